"""Mutation runner over dtrain_cuda.cu, for tests/cuda/mutate_cuda.sh.

Every mutant is a file of its own, compiled for the emulated device and linked with the tests of its
section. Killed: a test fails, crashes or does not end. Survived: all pass, so either a test is missing
or the change means nothing; which of the two, a person has to see. A mutant that does not compile is
replaced by another one. The same seed makes the same mutants.
"""
import argparse
import concurrent.futures
import os
import pathlib
import random
import re
import signal
import subprocess
import threading
import time

# The tests of a section, which is a file of src/device/cuda, the quickest verdict first. A section without an entry
# takes all.
TESTS = {
    "device": ["device", "guest"],
    "memory": ["device", "guest"],
    "elements": ["elementwise"],
    "elementwise": ["elementwise"],
    "reductions": ["elementwise", "optim", "device"],
    "optimizers": ["optim"],
    "gemm_plan": ["gemm"],
    "gemm": ["gemm"],
    "layernorm": ["layernorm"],
    "tokens": ["tokens"],
    "attention_gemm": ["attention"],
    "flash_tiles": ["flash", "attention"],
    "flash": ["flash", "attention"],
    "sparse": ["sparse"],
    "columns": ["sparse"],
    "convolution": ["conv"],
    "pooling": ["conv"],
}

# An index, not the size in a declaration.
INDEX = r"(?<!float )(?<!int )(?<!_t )(?<!double )(?<!char )(?<!bool )\b(\w+)\[([\w.>%*+ -]+)\](?!\s*[;={,]\s*$)"

# Name, pattern, replacement. Binary operators have blanks around them, template brackets do not.
MUTATIONS = [
    ("drop a barrier", r"__sync(threads|warp)\([^()]*\);", r";"),
    ("drop an asynchronous-copy wait", r"\b\w*cp_async_(wait|commit)\w*(<\w+>)?\([^()]*\);", r";"),
    ("< becomes <=", r" < ", r" <= "),
    ("<= becomes <", r" <= ", r" < "),
    ("> becomes >=", r" > ", r" >= "),
    (">= becomes >", r" >= ", r" > "),
    ("== becomes !=", r" == ", r" != "),
    ("+ becomes -", r" \+ ", r" - "),
    ("- becomes +", r" - ", r" + "),
    ("* becomes +", r"(?<=[\w)\]]) \* (?=[\w(])", r" + "),
    ("% becomes /", r" % ", r" / "),
    ("+= becomes =", r" \+= ", r" = "),
    ("-= becomes +=", r" -= ", r" += "),
    ("*= becomes =", r" \*= ", r" = "),
    ("index one further", INDEX, r"\1[\2 + 1]"),
    ("index one nearer", INDEX, r"\1[\2 - 1]"),
    ("negate a choice", r"\b((?:[A-Za-z]\w*(?:\.|->))*[A-Za-z]\w*) \? ", r"!\1 ? "),
    ("negate a condition", r"\bif \((\w[^()&|]*)\)", r"if (!(\1))"),
    ("&& becomes ||", r" && ", r" || "),
    ("|| becomes &&", r" \|\| ", r" && "),
    ("swap a transpose flag", r"TRANS_A\b", r"TRANS_B"),
    ("swap a transpose flag", r"TRANS_B\b", r"TRANS_A"),
    ("swap a transpose", r"CUBLAS_OP_T\b", r"CUBLAS_OP_N"),
    ("swap a transpose", r"CUBLAS_OP_N\b", r"CUBLAS_OP_T"),
    ("half the shuffle distance", r"\bdistance = 16\b", r"distance = 8"),
    ("shorter warp", r"% DTRAIN_CUDA_WARP\b", r"% 16"),
    ("half the lanes", r"DTRAIN_CUDA_ALL_LANES\b", r"0xffffu"),
    ("no grid stride", r" \* gridDim\.x\b", r""),
    ("thread for block", r"\bblockIdx\.x\b", r"threadIdx.x"),
    ("block for thread", r"\bthreadIdx\.x\b", r"blockIdx.x"),
    ("maximum becomes minimum", r"\b(f?)max(f?)\(", r"\1min\2("),
    ("minimum becomes maximum", r"\b(f?)min(f?)\(", r"\1max\2("),
    ("number + 1", r"(?<![\w.#])([1-9]\d*)(?=[;,) \]])", lambda m: str(int(m[1]) + 1)),
    ("number halved", r"(?<![\w.#])(\d*[02468])(?=[;,) \]])", lambda m: str(int(m[1]) // 2)),
    ("true becomes false", r"\btrue\b", r"false"),
    ("false becomes true", r"\bfalse\b", r"true"),
]


def blank(match):
    return re.sub(r"[^\n]", " ", match[0])


def code_lines(text):
    """(number, section, line) of the lines that the emulation compiles, comments and strings blanked."""
    masked = re.sub(r'/\*.*?\*/|//[^\n]*|"(\\.|[^"\\\n])*"', blank, text, flags=re.S)
    section, active = "manual", [True]
    for number, (line, raw) in enumerate(zip(masked.split("\n"), text.split("\n"))):
        title = re.match(r" \* src/device/cuda/(\w+)\.cuh$", raw)
        section = title[1] if title else section
        directive = re.match(r"\s*#\s*(\w+)\s*(.*)", line)
        if not directive:
            if active[-1] and not line.rstrip().endswith("\\"):
                yield number, section, line
        elif directive[1] in ("if", "ifdef", "ifndef"):
            known = {"DTRAIN_CUDA_EMULATION": True, "__CUDA_ARCH__": False}.get(directive[2].strip(), True)
            active.append(active[-1] and (known if directive[1] != "ifndef" else not known))
        elif directive[1] == "else":
            active[-1] = active[-2] and not active[-1]
        elif directive[1] == "endif":
            active.pop()


def all_mutants(text):
    """{mutation: [(line number, section, new line), ...]}"""
    lines, found = text.split("\n"), {}
    for number, section, masked in code_lines(text):
        if section == "table" or re.search(r"static_assert|template|__launch_bounds__|^\s*case ", masked):
            continue
        for name, pattern, replacement in MUTATIONS:
            for match in re.finditer(pattern, masked):
                new = match.expand(replacement) if isinstance(replacement, str) else replacement(match)
                line = lines[number]
                changed = line[: match.start()] + new + line[match.end() :]
                if changed != line:
                    found.setdefault(name, []).append((number, section, changed))
    return found


def shuffled(found, seed):
    """Every mutant once, the kinds of mutation in turn, so that rare ones are in a small sample too."""
    chance = random.Random(seed)
    piles = [[(name, *m) for m in chance.sample(sites, len(sites))] for name, sites in sorted(found.items())]
    while piles:
        chance.shuffle(piles)
        for pile in piles:
            yield pile.pop()
        piles = [pile for pile in piles if pile]


class Runner:
    def __init__(self, build):
        self.build = build
        self.flags = ["-std=c++17", "-O1", "-w", "-DDTRAIN_CUDA_EMULATION", "-DDTRAIN_USE_CUDA"]
        self.flags += ["-Itests/cuda/emulation", "-Itests/support", "-Itests/cuda", "-Itests", "-I."]
        self.cxx = os.environ.get("CXX") or "g++"
        self.limits = {}

    def prepare(self, section):
        """Builds the tests, and times each on the unchanged kernels."""
        self.names = sorted(p.stem.replace("test_cuda_", "") for p in pathlib.Path("tests").glob("test_cuda_*.c"))
        self.names = self.tests_of(section)
        programs = [f"{self.build}/emu/test_cuda_{n}" for n in self.names]
        command = ["make", f"-j{os.cpu_count()}", f"BUILD={self.build}", "CFLAGS=-O1 -w", f"CXX={self.cxx}", *programs]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for name in self.names:
            start = time.time()
            if subprocess.run([f"{self.build}/emu/test_cuda_{name}"], capture_output=True).returncode:
                raise SystemExit(f"mutate: test_cuda_{name} fails without any mutation")
            self.limits[name] = 3 * (time.time() - start) + 10

    def tests_of(self, section):
        listed = [n for n in TESTS.get(section, []) if n in self.names]
        return listed or sorted(self.names, key=lambda n: self.limits.get(n, 0))

    def run(self, folder, mutant, lines):
        """Who killed it: a test's name, None, or "" when it does not compile."""
        _, number, section, line = mutant
        folder.mkdir(parents=True, exist_ok=True)
        source, target = folder / "mutant.cu", folder / "mutant.o"
        source.write_text("\n".join(lines[:number] + [line] + lines[number + 1 :]))
        compile_it = [self.cxx, *self.flags, "-x", "c++", "-c", str(source), "-o", str(target)]
        if subprocess.run(compile_it, capture_output=True).returncode:
            return ""
        for name in self.tests_of(section):
            program = folder / "test"
            objects = [f"{self.build}/emu/test_cuda_{name}.o", target, f"{self.build}/emu/emulated.a"]
            link = [self.cxx, *map(str, objects), "-o", str(program), "-lm", "-lpthread"]
            subprocess.run(link, check=True)
            if not self.passes(program, self.limits[name]):
                return f"test_cuda_{name}"
        return None

    @staticmethod
    def passes(program, limit):
        """Until the first failed test; the next one may have begun, and goes too."""
        environment = {**os.environ, "DTRAIN_TEST_TIMEOUT": str(int(limit) + 1)}
        process = subprocess.Popen([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        for line in process.stdout:
            if line.startswith(b"  FAIL"):
                process.send_signal(signal.SIGSTOP)
                children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
                for child in children.read_text().split() if children.exists() else []:
                    os.kill(int(child), signal.SIGKILL)
                process.kill()
                process.wait()
                return False
        return process.wait() == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--build", default="build/mutate")
    parser.add_argument("--section", help="only this one, such as layernorm")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    options = parser.parse_args()
    text = pathlib.Path("dtrain_cuda.cu").read_text()
    lines, found = text.split("\n"), all_mutants(text)
    order = (m for m in shuffled(found, options.seed) if options.section in (None, m[2]))
    print(f"{sum(map(len, found.values()))} mutants of {len(found)} kinds; a sample of {options.count}, seed {options.seed}")

    def show(verdict, mutant):
        name, number, section, line = mutant
        print(f"{verdict} [{section}] line {number + 1}: {name}\n    - {lines[number].strip()}\n    + {line.strip()}", flush=True)

    if options.list:
        for mutant in (m for _, m in zip(range(options.count), order)):
            show("       ", mutant)
        return
    runner = Runner(options.build)
    runner.prepare(options.section)
    results, lock = [], threading.Lock()

    def worker(index):
        while True:
            with lock:
                mutant = next(order, None) if len(results) + len(running) < options.count else None
                running.add(index) if mutant else None
            if not mutant:
                return
            killer = runner.run(pathlib.Path(options.build) / f"worker{index}", mutant, lines)
            with lock:
                running.discard(index)
                if killer == "":
                    continue
                results.append((killer, mutant))
                show(f"{'killed by ' + killer if killer else 'SURVIVED'}", mutant)

    running = set()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(worker, range(os.cpu_count())))
    survivors = [m for killer, m in results if not killer]
    print(f"\n{len(results) - len(survivors)} killed, {len(survivors)} survived of {len(results)}")
    for mutant in survivors:
        show("SURVIVED", mutant)


if __name__ == "__main__":
    main()
