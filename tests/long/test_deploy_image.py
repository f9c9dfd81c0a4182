"""A container image without a container engine: the stages of a Dockerfile become root file systems, by its own RUN
lines, and its ENTRYPOINT runs in one of them, in namespaces of its own, as its USER.

    python3 tests/long/test_deploy_image.py check DOCKERFILE
    python3 tests/long/test_deploy_image.py build DOCKERFILE TARGET FOLDER [debootstrap] [PREBUILT]
    python3 tests/long/test_deploy_image.py run FOLDER/TARGET VOLUMES ARGUMENTS...
    python3 tests/long/test_deploy_image.py pods FOLDER/TARGET VOLUMES PODS

"pods" runs what test_deploy_manifests.py has written into PODS, all pods on one machine without a network: each in the
image, with its environment, as its user, under its names. PODS/NAME gets out and status; who makes PODS/NAME/TERM there
has TERM sent to that pod, as a kubelet does.

With "debootstrap" a base image is a Debian that mmdebstrap makes, and packages come from the network. Without it,
which takes minutes less, a base image is the /usr of this host, read-only, with an /etc of its own; apt-get is a script
that succeeds when the packages that it is told to install are installed here. All other RUN lines are the same, and
what make has built in PREBUILT is put into the tree, but for train_gpt: the library need not be compiled again."""
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def instructions(dockerfile):
    """Yield (NAME, text) with continued lines joined and comments left out."""
    held = ""
    for line in open(dockerfile):
        line = line.rstrip("\n")
        if line.lstrip().startswith("#") or not line.strip():
            continue
        held += line.strip() if held else line
        if held.endswith("\\"):
            held = held[:-1]
            continue
        name, text = held.split(None, 1)
        yield name.upper(), text
        held = ""


def substitute(text, values):
    return re.sub(r"\$\{(\w+)\}", lambda m: values.get(m.group(1), ""), text)


def stages(dockerfile):
    """The stages in order: {name, base, steps}; base is resolved by the ARGs before the first FROM."""
    values, found = {}, []
    for name, text in instructions(dockerfile):
        if name == "ARG" and not found:
            key, _, value = text.partition("=")
            values[key] = value
        elif name == "FROM":
            words = text.split()
            label = words[2] if len(words) == 3 and words[1].upper() == "AS" else str(len(found))
            found.append({"name": label, "base": substitute(words[0], values), "steps": []})
        elif found:
            found[-1]["steps"].append((name, text))
        else:
            raise SystemExit(f"{dockerfile}: {name} before FROM")
    return found


def exec_form(text):
    """The words of ["a", "b"]. The shell form would put a shell in front, which passes no signal on."""
    words = json.loads(text)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(text)
    return words


def inherited(all_stages, stage):
    """All steps of an image: those of the stages that it is FROM, and its own."""
    base = [s for s in all_stages if s["name"] == stage["base"]]
    return (inherited(all_stages, base[0]) if base else []) + stage["steps"]


def check(dockerfile):
    wrong = []
    all_stages = stages(dockerfile)
    names = [stage["name"] for stage in all_stages]
    for stage in all_stages:
        if stage["base"] not in names and not re.search(r":[\w.-]*\d[\w.-]*$", stage["base"]):
            wrong.append(f"{stage['base']}: the tag of a base image has no version")
        for name, text in stage["steps"]:
            if name not in ("RUN", "COPY", "WORKDIR", "USER", "ENV", "ARG", "LABEL", "VOLUME", "ENTRYPOINT", "CMD"):
                wrong.append(f"{name} {text}: I do not know this instruction")
            if name in ("ENTRYPOINT", "CMD"):
                try:
                    exec_form(text)
                except ValueError:
                    wrong.append(f"{name} {text}: not the exec form, so TERM ends at a shell")
            if name == "RUN" and "apt-get install" in text and not ("--no-install-recommends" in text and "rm -rf /var/lib/apt/lists" in text):
                wrong.append(f"RUN {text}: leaves what no image needs")
            source = text.split()[0]
            if name == "COPY" and source.startswith("--from=") and source[7:] not in names:
                wrong.append(f"COPY {text}: there is no such stage")
            for path in text.split()[:-1] if name == "COPY" and not source.startswith("--") else []:
                if not os.path.exists(path):
                    wrong.append(f"COPY {text}: {path} is not in the tree")
    used = {stage["base"] for stage in all_stages}
    for stage in all_stages:
        steps = dict(inherited(all_stages, stage))
        if stage["name"] in used or "ENTRYPOINT" not in steps:
            continue # not an image that somebody starts
        if not re.fullmatch(r"[1-9]\d*", steps.get("USER", "")):
            wrong.append(f"{stage['name']}: USER is {steps.get('USER')}; runAsNonRoot wants a number that is not 0")
        if inherited(all_stages, stage)[-1][0] == "RUN":
            wrong.append(f"{stage['name']}: RUN behind USER")
    for line in wrong:
        print(f"{dockerfile}: {line}")
    return not wrong


# ---- Building ----

def in_context(path, rules):
    """Whether .dockerignore lets a path pass: the last rule that matches it or a folder above it decides."""
    passes = True
    above = ["/".join(path.split("/")[: i + 1]) for i in range(path.count("/") + 1)]
    for rule in rules:
        if any(fnmatch.fnmatchcase(p, rule.lstrip("!")) and p.count("/") == rule.count("/") for p in above):
            passes = rule.startswith("!")
    return passes


def context():
    rules = [line.strip() for line in open(".dockerignore") if line.strip() and not line.startswith("#")]
    into = {rule.lstrip("!").split("/")[0] for rule in rules if rule.startswith("!")}
    for folder, folders, files in os.walk("."):
        folder = os.path.relpath(folder)
        if folder == ".":
            folders[:] = [f for f in folders if in_context(f, rules) or f in into]
        for file in files:
            path = os.path.normpath(os.path.join(folder, file))
            if in_context(path, rules):
                yield path


def put(source, target):
    """Copy like COPY: a folder's contents, or a file, under target; times stay, for make."""
    if os.path.isdir(source):
        shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)
        return
    if target.endswith("/") or os.path.isdir(target):
        target = os.path.join(target, os.path.basename(source))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copy2(source, target)


APT = """#!/bin/sh
# apt-get of an image whose /usr is the host's: what is to be installed must be installed there.
[ "$1" = install ] || exit 0
for word; do
    case $word in install | -*) continue ;; esac
    dpkg-query -W -f '${Status}\\n' "$word" | grep -q 'ok installed' || { echo "$word is not installed on this host"; exit 1; }
done
"""


def base(root, debootstrap):
    os.makedirs(root)
    if debootstrap:
        archive = os.path.join(os.path.dirname(root), "base.tar")
        if not os.path.exists(archive):
            subprocess.run(["mmdebstrap", "--variant=minbase", "--quiet", "bookworm", archive], check=True)
        subprocess.run(["tar", "-xpf", archive, "-C", root], check=True)
        open(f"{root}/etc/hosts", "a").close()  # an engine's, bound over it
        return
    for folder in ("usr", "proc", "dev", "tmp", "run", "home", "root", "opt", "var/tmp", "var/lib/dpkg", "local/sbin", "local/bin"):
        os.makedirs(f"{root}/{folder}")
    os.chmod(f"{root}/tmp", 0o1777)
    for folder in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{folder}"):
            os.symlink(f"usr/{folder}", f"{root}/{folder}")
    subprocess.run(["cp", "-a", "/etc", f"{root}/etc"], check=True)
    with open(f"{root}/local/sbin/apt-get", "w") as file:
        file.write(APT)
    os.chmod(f"{root}/local/sbin/apt-get", 0o755)


# What an engine does before it starts process 1. $1: root, $2: "root" or a user's number, $3: folder, $4: volumes; then the command.
MOUNT = r"""
set -e
root=$1 user=$2 folder=$3 volumes=$4; shift 4
mount --bind "$root" "$root"
if [ -d "$root/local" ]; then
    mount --rbind /usr "$root/usr"; mount -o remount,bind,ro "$root/usr"
    mount --bind "$root/local" "$root/usr/local"
    mount --bind /var/lib/dpkg "$root/var/lib/dpkg"; mount -o remount,bind,ro "$root/var/lib/dpkg"
fi
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom tty; do : >"$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
mkdir "$root/dev/shm"; mount -t tmpfs -o size=64m,mode=1777 shm "$root/dev/shm"
mount -t proc proc "$root/proc"
volume() { # volume PATH [ro]
    mkdir -p "$volumes/$1" "$root/$1"; chown "$user:$user" "$volumes/$1"
    mount --bind "$volumes/$1" "$root/$1"
    [ "$2" != ro ] || mount -o remount,bind,ro "$root/$1"
}
inside() { # inside VARIABLES COMMAND...: the variables are words; the command is exec'ed
    variables=$1; shift
    exec env -i PATH="$PATH" TEST_MARK="$TEST_MARK" $variables chroot ${at:+--userspec="$at:$at"} "$root" \
        sh -c 'cd "$1" && shift && exec "$@"' sh "$folder" "$@"
}
"""
BUILD = MOUNT + r"""
cp /etc/resolv.conf "$root/etc/resolv.conf"
inside "HOME=/root DEBIAN_FRONTEND=noninteractive" "$@"
"""
RUN = MOUNT + r"""
at=$user
ip link set lo up
volume data; volume checkpoints
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -o remount,bind,ro "$root"
inside HOME=/home/dtrain "$@"
"""
PODS = MOUNT + r"""
pods=$1 at=$user; shift
ip link set lo up
while read -r path how; do [ "$path" = /dev/shm ] || volume "$path" "$how"; done <"$pods/mounts"
mount --bind "$pods/hosts" "$root/etc/hosts"
mount -o remount,bind,ro "$root"
cd "$pods"
for pod in */; do
    set --
    while read -r word; do set -- "$@" "$word"; done <"$pod/args"
    ( inside "HOME=/home/dtrain $(cat "$pod/env")" tini -s -- "$@" >"$pod/out" 2>&1 ) &
    echo $! >"$pod/pid"
done
while :; do
    alive=
    for pod in */; do
        [ ! -e "$pod/TERM" ] || { rm "$pod/TERM"; kill -TERM "$(cat "$pod/pid")"; }
        kill -0 "$(cat "$pod/pid")" 2>/dev/null && alive=yes
    done
    [ -n "$alive" ] || break
    sleep 0.1
done
for pod in */; do status=0; wait "$(cat "$pod/pid")" || status=$?; echo $status >"$pod/status"; done
"""


def enter(script, root, user, folder, volumes, command, network, replace=False):
    """Run a command as process 1 of a root file system; with `replace` this process becomes the unshare around it."""
    line = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts"] + ([] if network else ["--net"])
    line += ["sh", "-c", script, "sh", root, user, folder, volumes] + command
    environment = dict(os.environ, PATH=PATH)
    if replace:
        os.execvpe(line[0], line, environment)
    return subprocess.run(line, env=environment).returncode


def build(dockerfile, target, folder, debootstrap=False, prebuilt=None):
    folder = os.path.abspath(folder)
    all_stages = stages(dockerfile)
    named = {stage["name"]: stage for stage in all_stages}

    def local(stage, path):
        """Where a path of an image lies on this host."""
        if not debootstrap and path.startswith("/usr/local/"):
            path = path[len("/usr"):]
        return f"{folder}/{stage}{path}"

    def make(name):
        stage, root = named[name], f"{folder}/{name}"
        if os.path.exists(f"{root}.json"):
            return json.load(open(f"{root}.json"))
        if stage["base"] in named:
            image = dict(make(stage["base"]))
            subprocess.run(["cp", "-a", f"{folder}/{stage['base']}", root], check=True)
        else:
            image = {"WORKDIR": "/", "USER": "root", "ENTRYPOINT": [], "CMD": [], "ENV": {}}
            base(root, debootstrap)
        for key, text in stage["steps"]:
            if key == "RUN":
                print(f"{name}: RUN {text}", flush=True)
                script = "".join(f"export {k}={v}\n" for k, v in image["ENV"].items()) + text
                if enter(BUILD, root, "root", image["WORKDIR"], "none", ["/bin/sh", "-ec", script], True):
                    raise SystemExit(f"{dockerfile}: {name}: failed: RUN {text}")
            elif key == "WORKDIR":
                image[key] = text
                os.makedirs(local(name, text), exist_ok=True)
            elif key == "COPY":
                words = text.split()
                to = os.path.join(image["WORKDIR"], words[-1])
                if words[0].startswith("--from="):
                    make(words[0][7:])
                    for source in words[1:-1]:
                        put(local(words[0][7:], source), local(name, to))
                elif words[0] == ".":
                    for path in context():
                        put(path, local(name, os.path.normpath(os.path.join(to, path))))
                    if prebuilt:
                        os.makedirs(local(name, image["WORKDIR"] + "/build"), exist_ok=True)
                        for file in os.listdir(prebuilt):
                            if os.path.isfile(f"{prebuilt}/{file}") and not file.startswith("train_gpt"):
                                put(f"{prebuilt}/{file}", local(name, image["WORKDIR"] + "/build/"))
                else:
                    for source in words[:-1]:
                        put(source, local(name, to))
            elif key in ("ENTRYPOINT", "CMD"):
                image[key] = exec_form(text)
            elif key == "ENV":
                image[key].update(word.split("=", 1) for word in text.split())
            elif key == "USER":
                image[key] = text
        json.dump(image, open(f"{root}.json", "w"))
        return image

    make(target)


def run(image, volumes, arguments):
    """docker run --network none --read-only: with the image's entry point, user and folder."""
    config = json.load(open(f"{image}.json"))
    command = config["ENTRYPOINT"] + (arguments or config["CMD"])
    if arguments[:1] == ["--entrypoint"]:
        command = arguments[1:]
    enter(RUN, os.path.abspath(image), config["USER"], config["WORKDIR"], os.path.abspath(volumes), command, False, replace=True)


def pods(image, volumes, folder):
    config, folder = json.load(open(f"{image}.json")), os.path.abspath(folder)
    user = open(f"{folder}/user").read().strip()
    enter(PODS, os.path.abspath(image), user, config["WORKDIR"], os.path.abspath(volumes), [folder], False, replace=True)


what, rest = sys.argv[1], sys.argv[2:]
if what == "check":
    sys.exit(0 if check(*rest) else 1)
elif what == "build":
    full = "debootstrap" in rest
    rest = [word for word in rest if word != "debootstrap"]
    build(rest[0], rest[1], rest[2], full, rest[3] if len(rest) > 3 else None)
elif what == "run":
    run(rest[0], rest[1], rest[2:])
elif what == "pods":
    pods(*rest)
