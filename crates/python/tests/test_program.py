"""``python -m memferry``, and what the package says about itself."""

import importlib.metadata
import json
import subprocess
import sys

import memferry


def test_the_doctor_finds_copies_and_messages_well():
    said = subprocess.run(
        [sys.executable, "-m", "memferry", "doctor", "--json"], capture_output=True, text=True
    )
    assert said.returncode == 0, said
    checks = json.loads(said.stdout)["checks"]
    assert checks["copies"]["ok"] and checks["messages"]["ok"]
    said = subprocess.run([sys.executable, "-m", "memferry", "doctor"], capture_output=True, text=True)
    assert "copies" in said.stdout


def test_the_version_is_that_of_the_package():
    assert memferry.__version__ == importlib.metadata.version("memferry")


def test_every_name_of_the_stubs_exists():
    import ast
    import pathlib

    from memferry import _memferry

    path = pathlib.Path(memferry.__file__).with_name("_memferry.pyi")
    for node in ast.parse(path.read_text().replace("type Memory", "Memory").replace("type _Tensor", "_Tensor")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            there = getattr(_memferry, node.name)
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef):
                        assert hasattr(there, member.name), f"{node.name}.{member.name}"
    assert set(memferry.__all__) <= set(dir(memferry))
