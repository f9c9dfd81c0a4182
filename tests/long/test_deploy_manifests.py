"""What is in the manifests of examples/deploy/kubernetes, without a cluster.

    python3 tests/long/test_deploy_manifests.py check FILE...       structure, types, names that must agree
    python3 tests/long/test_deploy_manifests.py kubectl FILE...     what kubectl decodes into Go types is what is written
    python3 tests/long/test_deploy_manifests.py pods FILE FOLDER    what the platform would start, one FOLDER/NAME a pod
    python3 tests/long/test_deploy_manifests.py probes FILE         the commands of its exec probes, a line of JSON each

"check" holds every object against a description of the fields that are used here (SHAPES), written from the API
references; a field that is not in it is an error, whether it is misspelt or only new: then describe it. The resources
of JobSet and Kubeflow are described too, and pod templates inside of them are those of Kubernetes."""
import json
import os
import re
import subprocess
import sys
import tempfile

import yaml

# ---- Descriptions: a type, a function, [item], {field: description}; "field!" is required, "*" any other name ----


def quantity(v):
    return isinstance(v, (str, int)) and re.fullmatch(r"\d+(\.\d+)?(m|[kMGT]i?)?", str(v))


def name(v):
    return isinstance(v, str) and re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", v)


def one_of(*words):
    return lambda v: v in words


def positive(v):
    return isinstance(v, int) and not isinstance(v, bool) and v > 0


def count(v):
    return isinstance(v, int) and not isinstance(v, bool) and v >= 0


META = {"name!": name, "labels": {"*": str}}
ENV = {"name!": str, "value": str, "valueFrom": {"secretKeyRef": {"name!": name, "key!": str}}}
QUANTITIES = {"*": quantity}
RESOURCES = {"requests": QUANTITIES, "limits": QUANTITIES}
PROBE = {
    "exec": {"command!": [str]}, "tcpSocket": {"port!": positive},
    "initialDelaySeconds": count, "periodSeconds": positive, "timeoutSeconds": positive, "failureThreshold": positive,
}
CONTAINER = {
    "name!": name, "image!": str, "command": [str], "args": [str], "env": [ENV], "resources": RESOURCES,
    "startupProbe": PROBE, "livenessProbe": PROBE, "readinessProbe": PROBE,
    "securityContext": {"allowPrivilegeEscalation": bool, "readOnlyRootFilesystem": bool, "capabilities": {"drop": [str]}},
    "volumeMounts": [{"name!": name, "mountPath!": str, "readOnly": bool}],
}
VOLUME = {
    "name!": name, "persistentVolumeClaim": {"claimName!": name},
    "emptyDir": {"medium": one_of("Memory"), "sizeLimit": quantity},
}
POD = {
    "restartPolicy": one_of("Never", "OnFailure"), "terminationGracePeriodSeconds": positive, "enableServiceLinks": bool,
    "automountServiceAccountToken": bool, "subdomain": name, "containers!": [CONTAINER], "volumes": [VOLUME],
    "securityContext": {
        "runAsNonRoot": bool, "runAsUser": positive, "runAsGroup": positive, "fsGroup": positive,
        "fsGroupChangePolicy": one_of("OnRootMismatch", "Always"), "seccompProfile": {"type!": one_of("RuntimeDefault")},
    },
}
TEMPLATE = {"metadata": {"labels": {"*": str}}, "spec!": POD}
ACTION = one_of("Ignore", "FailJob", "Count")
JOB = {
    "completionMode": one_of("Indexed", "NonIndexed"), "completions": positive, "parallelism": positive,
    "backoffLimit": count, "template!": TEMPLATE,
    "podFailurePolicy": {"rules!": [{
        "action!": ACTION,
        "onExitCodes": {"containerName": name, "operator!": one_of("In", "NotIn"), "values!": [positive]},
        "onPodConditions": [{"type!": one_of("DisruptionTarget"), "status!": one_of("True", "False")}],
    }]},
}
REPLICATED = {"name!": name, "replicas": positive, "template!": {"metadata": {"labels": {"*": str}}, "spec!": JOB}}
JOBSET = {
    "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": name},
    "failurePolicy": {"maxRestarts": count}, "replicatedJobs!": [REPLICATED],
}
RUN_POLICY = {"backoffLimit": count, "cleanPodPolicy": one_of("Running", "All", "None")}
REPLICA = {"replicas!": positive, "restartPolicy": one_of("Never", "OnFailure", "Always", "ExitCode"), "template!": TEMPLATE}
SHAPES = {
    ("v1", "PersistentVolumeClaim"): {
        "accessModes!": [one_of("ReadWriteOnce", "ReadWriteMany")], "resources!": {"requests!": {"storage!": quantity}}},
    ("v1", "Service"): {"clusterIP!": str, "publishNotReadyAddresses": bool, "selector!": {"*": str}},
    ("batch/v1", "Job"): JOB,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOBSET,
    ("kubeflow.org/v1", "PyTorchJob"): {
        "nprocPerNode": str, "runPolicy": RUN_POLICY, "pytorchReplicaSpecs!": {"Master": REPLICA, "Worker": REPLICA}},
    ("kubeflow.org/v2beta1", "MPIJob"): {
        "mpiImplementation": one_of("OpenMPI", "Intel", "MPICH"), "slotsPerWorker": positive, "sshAuthMountPath": str,
        "launcherCreationPolicy": one_of("AtStartup", "WaitForWorkersReady"), "runPolicy": RUN_POLICY,
        "mpiReplicaSpecs!": {"Launcher!": REPLICA, "Worker": REPLICA}},
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "mlPolicy": {"numNodes": positive, "torch": {}}, "template!": {"spec!": JOBSET}},
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef!": {"apiGroup": str, "kind": one_of("TrainingRuntime", "ClusterTrainingRuntime"), "name!": name},
        "trainer": {"image": str, "command": [str], "args": [str], "env": [ENV], "numNodes": positive,
                    "numProcPerNode": positive, "resourcesPerNode": RESOURCES}},
}


def hold(value, shape, where, wrong):
    """Compare a value with its description; what does not fit is said in `wrong`."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            wrong.append(f"{where} is {value!r}, not an object")
            return
        for key, part in value.items():
            inner = shape.get(key, shape.get(f"{key}!", shape.get("*")))
            if inner is None:
                wrong.append(f"{where}.{key}: there is no such field")
            else:
                hold(part, inner, f"{where}.{key}", wrong)
        for key in shape:
            if key.endswith("!") and key[:-1] not in value:
                wrong.append(f"{where}.{key[:-1]} is missing")
    elif isinstance(shape, list):
        if not isinstance(value, list) or not value:
            wrong.append(f"{where} is {value!r}, not a list of something")
            return
        for i, part in enumerate(value):
            hold(part, shape[0], f"{where}[{i}]", wrong)
    elif isinstance(shape, type):
        if type(value) is not shape:
            wrong.append(f"{where} is {value!r}, not of type {shape.__name__}")
    elif not shape(value):
        wrong.append(f"{where} is {value!r}")


def load(files):
    return [(file, doc) for file in files for doc in yaml.safe_load_all(open(file))]


def pod_specs(node):
    """Every pod spec inside of an object."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for part in node.values():
            yield from pod_specs(part)
    elif isinstance(node, list):
        for part in node:
            yield from pod_specs(part)


def flag(args, wanted, other=None):
    return args[args.index(wanted) + 1] if wanted in args[:-1] else other


def check_pod(where, doc, spec, claims, wrong):
    """What Kubernetes would find out too late, or never."""
    say = lambda text: wrong.append(f"{where}: {text}")
    volumes = {v["name"] for v in spec.get("volumes", [])}
    security = spec.get("securityContext", {})
    if not security.get("runAsNonRoot") or security.get("runAsUser") != 10001:
        say("does not run as the image's user, 10001")
    if spec.get("enableServiceLinks") is not False:
        say("enableServiceLinks is not false: a Service named dtrain would set DTRAIN_PORT")
    if spec.get("terminationGracePeriodSeconds", 30) < 60:
        say("the grace period is too short for a checkpoint")
    for volume in spec.get("volumes", []):
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim and claim not in claims:
            say(f"the claim {claim} is in no manifest")
    for container in spec["containers"]:
        args, mounts = container.get("args", []), container.get("volumeMounts", [])
        if "command" in container:
            say("command takes the place of the image's entry point, which is process 1")
        if not container.get("securityContext", {}).get("readOnlyRootFilesystem"):
            say("the root file system is not read-only")
        for mount in mounts:
            if mount["name"] not in volumes:
                say(f"{mount['name']} is mounted and is no volume")
        for volume in volumes - {m["name"] for m in mounts}:
            say(f"the volume {volume} is not mounted")
        check_args(where, doc, container["image"], args, mounts, wrong)


def check_args(where, doc, image, args, mounts, wrong):
    say = lambda text: wrong.append(f"{where}: {text}")
    if "train_gpt" not in args:
        return
    if ("cuda" in args) != image.endswith(":cuda") or ("mpi" in args) != image.endswith(":mpi"):
        say(f"these arguments are not for the image {image}")
    if flag(args, "--stop-status") != "143" or flag(args, "--resume") != "auto":
        say("a run that was told to stop would count as complete, or not go on")
    writable = [m["mountPath"] for m in mounts if not m.get("readOnly")]
    for wanted in ("--checkpoint", "--log", "--prometheus", "--tensorboard"):
        path = flag(args, wanted)
        if path and not any(path.startswith(w + "/") for w in writable) and "mpirun" not in args: # there, those of the workers
            say(f"{wanted} {path} is on no volume that can be written to")


def check_counts(where, doc, wrong):
    """Numbers that must agree."""
    say = lambda text: wrong.append(f"{where}: {text}")
    spec = doc["spec"]
    for job in jobs_of(doc):
        container = job["template"]["spec"]["containers"][0]
        args = container.get("args", [])
        if job.get("completionMode") == "Indexed":
            env = {e["name"]: e.get("value") for e in container.get("env", [])}
            size = env.get("WORLD_SIZE", flag(args, "--nnodes"))
            if not job.get("completions") == job.get("parallelism") == int(size or 0):
                say(f"completions {job.get('completions')}, parallelism {job.get('parallelism')} and {size} in the container differ")
        for rule in job.get("podFailurePolicy", {}).get("rules", []):
            names = [c["name"] for c in job["template"]["spec"]["containers"]]
            if rule.get("onExitCodes", {}).get("containerName", names[0]) not in names:
                say("podFailurePolicy names a container that there is not")
        gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu")
        if gpus and "--nproc" in args and int(flag(args, "--nproc")) != gpus:
            say(f"{flag(args, '--nproc')} ranks a node and {gpus} GPUs")
    if doc["kind"] == "PyTorchJob":
        for replica in spec["pytorchReplicaSpecs"].values():
            container = replica["template"]["spec"]["containers"][0]
            if container["name"] != "pytorch" or str(container["resources"]["limits"]["nvidia.com/gpu"]) != spec["nprocPerNode"]:
                say("the container is not named pytorch, or nprocPerNode is not its number of GPUs")
    if doc["kind"] == "TrainJob" and spec["trainer"]["numProcPerNode"] != spec["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"]:
        say("numProcPerNode is not the number of GPUs")
    if doc["kind"] == "MPIJob":
        args = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"]
        ranks = spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
        if not int(flag(args, "-n")) == int(flag(args, "--ranks")) == ranks:
            say(f"mpirun -n, --ranks and the {ranks} slots differ")


def jobs_of(doc):
    """The specs of the Jobs of a Job, a JobSet or a TrainingRuntime."""
    if doc["kind"] == "Job":
        return [doc["spec"]]
    jobset = {"JobSet": doc.get("spec"), "TrainingRuntime": doc.get("spec", {}).get("template", {}).get("spec")}.get(doc["kind"])
    return [r["template"]["spec"] for r in jobset["replicatedJobs"]] if jobset else []


def check(files):
    wrong, docs = [], load(files)
    claims = {doc["metadata"]["name"] for _, doc in docs if doc.get("kind") == "PersistentVolumeClaim"}
    for file, doc in docs:
        kind = (doc.get("apiVersion"), doc.get("kind"))
        where = f"{os.path.basename(file)}: {kind[1]}"
        if kind not in SHAPES:
            wrong.append(f"{where}: I do not know {kind}")
            continue
        before = len(wrong)
        hold(doc, {"apiVersion!": str, "kind!": str, "metadata!": META, "spec!": SHAPES[kind]}, where, wrong)
        if len(wrong) > before:
            continue
        for spec in pod_specs(doc):
            check_pod(where, doc, spec, claims, wrong)
        check_counts(where, doc, wrong)
        if kind[1] == "TrainJob":
            trainer = doc["spec"]["trainer"]
            runtimes = [d for _, d in docs if d.get("kind") == "TrainingRuntime" and d["metadata"]["name"] == doc["spec"]["runtimeRef"]["name"]]
            mounts = list(pod_specs(runtimes))[0]["containers"][0]["volumeMounts"] if runtimes else []
            check_args(where, doc, trainer["image"], trainer["args"], mounts, wrong)
        if kind[1] == "Service":
            jobs = [d["metadata"]["name"] for f, d in docs if f == file and d.get("kind") == "Job"]
            if doc["spec"]["selector"].get("job-name") not in jobs or doc["spec"]["clusterIP"] != "None":
                wrong.append(f"{where}: is not headless, or selects the pods of no Job here")
    print("\n".join(wrong))
    return not wrong


# ---- kubectl ----


def leaves(node, path=""):
    if isinstance(node, dict) and node:
        for key, part in node.items():
            yield from leaves(part, f"{path}.{key}")
    elif isinstance(node, list) and node:
        for i, part in enumerate(node):
            yield from leaves(part, f"{path}[{i}]")
    else:
        yield path, str(node)


# Debian 12's kubectl is 1.20; these fields came later.
SINCE = {"completionMode": 21, "podFailurePolicy": 25}


def kubectl(files):
    """Let kubectl decode the built-in objects, and each pod template of the others in a Job of its own; compare leaves."""
    version = json.loads(subprocess.run(["kubectl", "version", "--client", "-o", "json"], check=True, capture_output=True).stdout)
    minor = int(re.match(r"\d+", version["clientVersion"]["minor"]).group())
    wrong, number = [], 0
    for file, doc in load(files):
        objects = [doc]
        if (doc["apiVersion"], doc["kind"]) not in (("v1", "Service"), ("batch/v1", "Job"), ("v1", "PersistentVolumeClaim")):
            objects = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"template": {"spec": dict(spec)}}}
                       for spec in pod_specs(doc)]
        for one in objects:
            if not list(pod_specs(one)): # set image takes pods alone; a label can be set anywhere
                change = ["label", "--local", "-f", "-", "dtrain-test=1"]
            else:
                change = ["set", "image", "--local", "-f", "-", f"{next(pod_specs(one))['containers'][0]['name']}=changed"]
            run = subprocess.run(["kubectl"] + change + ["-o", "yaml"], input=yaml.safe_dump(one), capture_output=True, text=True)
            where, number = f"{os.path.basename(file)}: {doc['kind']}", number + 1
            if run.returncode:
                wrong.append(f"{where}: {run.stderr.strip()}")
                continue
            after = dict(leaves(yaml.safe_load(run.stdout)))
            for path, value in leaves(one):
                newer = [f for f, since in SINCE.items() if f in path and minor < since]
                if not newer and path not in after and value not in ("{}", "[]"):
                    wrong.append(f"{where}: kubectl drops {path}")
                elif not newer and after.get(path, value) != value and after.get(path) != "changed":
                    wrong.append(f"{where}: kubectl reads {path} = {value} as {after[path]}")
    print("\n".join(wrong))
    print(f"kubectl 1.{minor}: {number} objects")
    return not wrong and number > 0


# ---- Pods, as the platforms start them ----

GPU = {"layers": "1", "heads": "2", "channels": "16", "seq": "16", "batch": "2", "warmup": "2", "eval-batches": "0", "sample": "0",
       "global-batch": "8", "threads": "1", "timeout": "20"}


def small(args):
    """The same command for a machine of two cores: on the CPU, few steps of a tiny model."""
    args, at = list(args), args.index("train_gpt")
    for wanted, value in (("--device", "cpu"), ("--precision", "fp32"), ("--steps", os.environ.get("STEPS", "40")), ("--save-every", "20")):
        if wanted in args:
            args[args.index(wanted) + 1] = value
    for key, value in GPU.items():
        args += [f"--{key}", value]
    return args


def environment(container):
    return {e["name"]: e["value"] if "value" in e else "secret" for e in container.get("env", [])}


def job_pods(name_of_job, job, host=None):
    spec = job["template"]["spec"]
    number = job.get("parallelism", 1)
    for i in range(number):
        env = environment(spec["containers"][0])
        pod = f"{name_of_job}-{i}"
        if job.get("completionMode") == "Indexed":
            env["JOB_COMPLETION_INDEX"] = str(i)
        subdomain = host or spec.get("subdomain")
        yield pod, env, spec, [f"{pod}.{subdomain}", pod] if subdomain else [pod]


def pods(docs):
    """(name, environment, pod spec, its names in the cluster's DNS) of every pod that an object leads to."""
    for doc in docs:
        name_of, spec = doc["metadata"]["name"], doc["spec"]
        if doc["kind"] == "Job":
            yield from job_pods(name_of, spec)
        elif doc["kind"] == "JobSet":
            for replicated in spec["replicatedJobs"]:
                for i in range(replicated.get("replicas", 1)):
                    yield from job_pods(f"{name_of}-{replicated['name']}-{i}", replicated["template"]["spec"], name_of)
        elif doc["kind"] == "PyTorchJob":
            total = sum(r["replicas"] for r in spec["pytorchReplicaSpecs"].values())
            rank = 0
            for kind, replica in spec["pytorchReplicaSpecs"].items():
                for i in range(replica["replicas"]):
                    template = replica["template"]["spec"]
                    env = environment(template["containers"][0])
                    env.update(MASTER_PORT="23456", PET_MASTER_PORT="23456", MASTER_ADDR=f"{name_of}-master-0",
                               PET_MASTER_ADDR=f"{name_of}-master-0", WORLD_SIZE=str(total * int(spec["nprocPerNode"])),
                               RANK=str(rank), PET_NODE_RANK=str(rank), PET_NPROC_PER_NODE=spec["nprocPerNode"],
                               PET_NNODES=str(total), PYTHONUNBUFFERED="1")
                    pod = f"{name_of}-{kind.lower()}-{i}"
                    yield pod, env, template, [pod]
                    rank += 1
        elif doc["kind"] == "TrainJob":
            runtime = [d for d in docs if d["kind"] == "TrainingRuntime"][0]
            template = next(pod_specs(runtime))
            trainer = spec["trainer"]
            container = dict(template["containers"][0], image=trainer["image"], args=trainer["args"], env=trainer["env"])
            for i in range(trainer["numNodes"]):
                env = environment(container)
                env.update(PET_NNODES=str(trainer["numNodes"]), PET_NPROC_PER_NODE=str(trainer["numProcPerNode"]),
                           PET_NODE_RANK=str(i), PET_MASTER_ADDR=f"{name_of}-node-0-0.{name_of}", PET_MASTER_PORT="29500",
                           JOB_COMPLETION_INDEX=str(i))
                pod = f"{name_of}-node-0-{i}"
                yield pod, env, dict(template, containers=[container]), [f"{pod}.{name_of}"]
        elif doc["kind"] == "MPIJob":
            launcher = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
            env = environment(launcher["containers"][0])
            workers = [f"{name_of}-worker-{i}" for i in range(spec["mpiReplicaSpecs"]["Worker"]["replicas"])]
            env.update(OMPI_MCA_orte_default_hostfile="/etc/mpi/hostfile", OMPI_MCA_orte_keep_fqdn_hostnames="true",
                       OMPI_MCA_orte_set_default_slots=str(spec["slotsPerWorker"]), K_MPI_JOB_ROLE="launcher")
            yield f"{name_of}-launcher", env, launcher, [f"{w}.{name_of}" for w in workers] + [f"{name_of}-launcher"]


def write_pods(file, folder):
    """FOLDER/NAME/{args,env} a pod, FOLDER/hosts (all of its names are this machine), FOLDER/mounts, FOLDER/user."""
    docs = [doc for _, doc in load([file])]
    hosts, mounts = [], set()
    for pod, env, spec, names in pods(docs):
        container = spec["containers"][0]
        os.makedirs(f"{folder}/{pod}")
        env["HOSTNAME"] = pod
        with open(f"{folder}/{pod}/env", "w") as out:
            out.writelines(f"{key}={value}\n" for key, value in env.items())
        with open(f"{folder}/{pod}/args", "w") as out:
            out.writelines(f"{word}\n" for word in small(container["args"]))
        hosts += names
        mounts |= {(m["mountPath"], "ro" if m.get("readOnly") else "rw") for m in container.get("volumeMounts", [])}
        with open(f"{folder}/user", "w") as out:
            out.write(f"{spec['securityContext']['runAsUser']}\n")
    with open(f"{folder}/hosts", "w") as out:
        out.write("127.0.0.1 localhost " + " ".join(hosts) + "\n")
    with open(f"{folder}/mounts", "w") as out:
        out.writelines(f"{path} {how}\n" for path, how in sorted(mounts))


def probes(file):
    for _, doc in load([file]):
        for spec in pod_specs(doc):
            for container in spec["containers"]:
                for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                    if "exec" in container.get(kind, {}):
                        print(kind, json.dumps(container[kind]["exec"]["command"]))


what, rest = sys.argv[1], sys.argv[2:]
if what == "check":
    sys.exit(0 if check(rest) else 1)
if what == "kubectl":
    sys.exit(0 if kubectl(rest) else 1)
if what == "pods":
    write_pods(*rest)
if what == "probes":
    probes(*rest)
