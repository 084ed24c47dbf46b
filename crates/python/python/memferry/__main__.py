"""``python -m memferry doctor``: what this machine offers to the package."""

import argparse
import importlib.util
import json
import os
import sys
import time

import memferry


def _copies():
    source, target = bytearray(os.urandom(1 << 20)) * 16, bytearray(16 << 20)
    memferry.copy(source=source, target=target)
    started = time.perf_counter()
    memferry.copy(source=source, target=target)
    seconds = time.perf_counter() - started
    if target != source:
        return False, "wrong bytes arrived"
    return True, f"16 MiB at {len(source) / seconds / 1e9:.1f} GB/s"


def _messages():
    with memferry.Endpoint(f"doctor-{os.getpid()}", background=True) as one:
        with memferry.Endpoint(f"doctor-{os.getpid()}-other") as other:
            peer = other.connect(one.name)
            received = bytearray(5)
            receive = one.irecv(received)
            other.send(peer, b"hello", timeout=60)
            receive.wait(60)
    return received == b"hello", "two endpoints of this process"


def _gpu():
    try:
        memferry.explain(1 << 20, gpu=0)
    except memferry.Error as error:
        return None, str(error)
    return True, "GPU 0"


def _module(name):
    found = importlib.util.find_spec(name) is not None
    return (True, "installed") if found else (None, "not installed")


def _checks():
    return {
        "copies": _copies,
        "messages": _messages,
        "GPU": _gpu,
        "NumPy": lambda: _module("numpy"),
        "PyTorch": lambda: _module("torch"),
    }


def doctor(as_json):
    results = {}
    for name, check in _checks().items():
        try:
            results[name] = check()
        except Exception as error:
            results[name] = (False, f"{type(error).__name__}: {error}")
    if as_json:
        rows = {name: {"ok": ok, "text": text} for name, (ok, text) in results.items()}
        print(json.dumps({"version": memferry.__version__, "checks": rows}))
    else:
        print(f"memferry {memferry.__version__}, Python {sys.version.split()[0]}")
        for name, (ok, text) in results.items():
            mark = {True: "ok", False: "FAILED", None: "-"}[ok]
            print(f"{name:<10} {mark:<7} {text}")
    return 0 if all(ok is not False for ok, _ in results.values()) else 1


def main():
    parser = argparse.ArgumentParser(prog="python -m memferry", description=__doc__)
    parser.add_argument("command", choices=["doctor"])
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    sys.exit(doctor(arguments.json))


if __name__ == "__main__":
    main()
