#!/usr/bin/env python3
"""press.py TIMES COMMAND...: runs a command on a terminal of its own and types Ctrl-C there, once its progress is under
way: so many seconds after that, and with commas between, so many seconds after the Ctrl-C before. Prints what the terminal got, and ends with the command's
exit status."""
import os
import pty
import select
import sys
import time

times = [float(each) for each in sys.argv[1].split(",")]
child, terminal = pty.fork()
if child == 0:
    os.environ["TERM"] = "xterm"
    os.execvp(sys.argv[2], sys.argv[2:])
got, since, pressed, deadline = b"", None, 0, time.monotonic() + 600
while time.monotonic() < deadline:
    if select.select([terminal], [], [], 0.02)[0]:
        try:
            got += os.read(terminal, 65536)
        except OSError:  # the command has ended
            break
    if since is None and b"\rstep 1/" in got:
        since = time.monotonic()
    if since is not None and pressed < len(times) and time.monotonic() - since >= times[pressed]:
        os.write(terminal, b"\x03")
        pressed += 1
        since = time.monotonic()
else:
    os.kill(child, 9)
sys.stdout.buffer.write(got.replace(b"\r\n", b"\n"))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)
