"""Writes modules whose imports do something, for tests of templates."""

from pathlib import Path

BODIES = {
    "harmless_one": "value = 1",
    "asks_for_temporary_folder": "import tempfile\nvalue = tempfile.gettempdir()",
    "harmless_two": "import harmless_one",
    "starts_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "opens_socket": "import socket\nkept = socket.socket()",
    "opens_file": "kept = open(__file__)",
    "makes_folder": "import tempfile\nkept = tempfile.TemporaryDirectory()",
    "starts_process": "import subprocess\nkept = subprocess.Popen(['sleep', '600'])",
    "raises": "raise ValueError('not today')",
    "leaves": "import sys\nsys.exit(3)",
    "dies": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "stops": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "draws": "import random\nvalue = random.random()",
    "takes_memory": "kept = bytes(1 << 40)",
}


def write_modules(folder: Path) -> None:
    for name, body in BODIES.items():
        (folder / f"{name}.py").write_text(body + "\n")
