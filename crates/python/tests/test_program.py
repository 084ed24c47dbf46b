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


def test_a_bench_prints_rows_in_the_format_of_all_benches():
    command = [sys.executable, "-m", "memferry.bench", "overhead", "--json", "--rounds", "1"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said
    assert said.stderr.startswith("measuring: a copy from Python\n")
    outcome = json.loads(said.stdout)
    fields = {"figure", "series", "bytes", "value", "unit", "low", "high", "rounds"}
    assert all(set(row) == fields for row in outcome["rows"])
    assert outcome["summary"]["python_overhead_us"] > 0 and outcome["missing"] == []


def test_a_bench_that_cannot_run_here_says_why():
    # A module that is None cannot be imported.
    program = "import sys; sys.modules['torch'] = None; from memferry import bench; bench.main()"
    command = [sys.executable, "-c", program, "load"]
    said = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert said.returncode == 0, said
    outcome = json.loads(said.stdout)
    assert outcome["rows"] == [] and "PyTorch and safetensors" in outcome["missing"][0]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 1 and "PyTorch and safetensors" in said.stderr


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
