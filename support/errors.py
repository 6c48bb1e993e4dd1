"""What goes wrong for reasons that the user can mend, and how it is said: in one line.

raise InputError("--m 80 is larger than --n 64: lower --m or raise --n")
line, code = explained(error)           # or None: a fault of ours, which needs its traceback
say("12 prompts are too long: dropped") # something to know, but no reason to stop
"""

import os
import re
import sys


class InputError(ValueError):
    """Something the user can mend; shown as one line, exit code 2."""


# torchrun sets all four. A cluster may set one of them, which says nothing about this program.
LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
RANK = int(os.environ["RANK"]) if LAUNCHED else 0  # the number of this process


def say(line: str) -> None:
    """Print to stderr, since stdout belongs to the results; one of several processes speaks."""
    if RANK == 0:
        print(line, file=sys.stderr)


# RuntimeErrors of libraries: words in the class's name or the first line, what is said, exit code.
KNOWN = {
    "logits are not finite": (  # found in sampling
        "the policy gives no probabilities any more, its weights have grown out of bounds: start a "
        "new run with a lower --lr (or --weight-decay, --beta)",
        2,
    ),
    # Neither on a CPU nor in vLLM's allocator has it a class of its own.
    "OutOfMemoryError|allocate memory|CUDA Error: out of memory": (
        "out of memory ({reason}): in the update lower --micro-batch (a resumed run may, too) or "
        "--m, in generation --n, --max-new-tokens or, for vLLM, --gpu-memory-utilization",
        1,
    ),
    "DistBackendError|gloo|Connection closed by peer": ("another process has ended ({reason})", 1),
}


def explained(error: Exception) -> tuple[str, int] | None:
    """The line to print and the exit code; None where only a traceback would help."""
    if isinstance(error, InputError):
        return str(error), 2
    if isinstance(error, OSError):  # disk full, no permission: the message names the file
        return str(error), 1
    reason = str(error).partition("\n")[0]
    for words, (line, code) in KNOWN.items() if isinstance(error, RuntimeError) else ():
        if re.search(words, f"{type(error).__name__}: {reason}"):
            return line.format(reason=reason), code
    return None
