"""The pages say what is so: Python that needs no framework runs, commands have the options they are given, errors are worded so.

What needs workers is in tests/parallel/test_torch_pages.py and test_keras_pages.py, the site in tests/integration/test_site.py.
"""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import click
import pytest
from click.testing import CliRunner

from hvd_quant import cli, registry
from tests import docs

ROOT = docs.ROOT
sys.path.insert(0, str(ROOT / "benchmarks"))
ALL = {docs.name_of(page): page for page in docs.PAGES}
TAKEN_FOR_GRANTED = {"mpirun", "source", "srun"}


# ----------------------------------------------------------------------------------------------------------------- Python

@pytest.mark.parametrize("page", [page for page in docs.pages("none") if page not in docs.pages("torch", "keras", "tensorflow")],
                         ids=docs.name_of)
def test_python_without_a_framework(page, monkeypatch):
    import cluster
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    fake = mock.create_autospec(cluster.Cluster)  # the real one takes root and seconds: tests/integration/test_cluster.py
    fake.return_value.__enter__.return_value = fake.return_value
    fake.return_value.bytes_sent.return_value = [0] * 4
    monkeypatch.setattr(cluster, "Cluster", fake)
    docs.run(page, (), {}, lambda code, names: code, lambda: None)


def test_each_page_with_python_is_run():
    run = {*docs.pages("none"), *docs.pages("torch", "keras", "tensorflow")}
    assert {docs.name_of(page) for page in docs.PAGES if docs.fenced(page, "python") and page not in run} == docs.ELSEWHERE


def test_the_complete_compressor_is_the_readmes():
    (own,) = [code for code in docs.fenced(ALL["README.md"], "python") if "class Sign(" in code]
    assert own == docs.fenced(ALL["docs/own.md"], "python")[0] and own.count("\n") < 30


def test_rays_executor_has_what_the_page_gives_it():
    horovod = pytest.importorskip("horovod")
    tree = ast.parse((Path(horovod.__file__).parent / "ray" / "runner.py").read_text())
    (executor,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "RayExecutor"]
    methods = {node.name: {argument.arg for argument in node.args.args} for node in executor.body if isinstance(node, ast.FunctionDef)}
    page = "".join(docs.fenced(ALL["docs/launch.md"], "python"))
    assert {"timeout_s"} <= methods["create_settings"] and {"num_workers", "cpus_per_worker"} <= methods["__init__"]
    assert re.findall(r"(\w+)=\w+[,)]", page.partition("RayExecutor(")[2].partition("\n")[0]) == ["timeout_s", "num_workers",
                                                                                               "cpus_per_worker"]
    assert {"start", "run", "shutdown"} <= set(methods)


# --------------------------------------------------------------------------------------------------------------- commands

def commands(page):
    """The commands of a page's shell blocks, and of lines that are set in by four."""
    text = "".join(block for block in docs.fenced(page, "bash"))
    outside = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    text += "\n".join(re.findall(r"^    ((?:[A-Z_]+=\S+ )*(?:python|horovodrun|chrt|make) (?:[^\\\n]|\\\n)*)", outside, re.M))
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Za-z_]+=", words[0]):
            words.pop(0)
        if words and words[0] != "export" and "$(" not in line:
            yield words


def options_of(words):
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def check_horovodrun(words):
    launch = pytest.importorskip("horovod.runner.launch")
    words = [re.sub(r"\$\w+", "4", word) for word in words]
    if words[1:] == ["--check-build"]:
        return
    with mock.patch.object(sys, "argv", words):
        parsed = launch.parse_args()
    assert parsed.command, words
    check(parsed.command)


def check_python(words):
    script, arguments = words[1], words[2:]
    if script in ("train.py", "setup.py", "-m"):  # the reader's own, setuptools', pytest
        return
    folder = ROOT / Path(script).parent
    source = "".join(path.read_text() for path in [ROOT / script, *folder.glob("*.py"), *(ROOT / "examples/common").glob("*.py")])
    if "--" in arguments:
        check(arguments[arguments.index("--") + 1:])
        arguments = arguments[:arguments.index("--")]
    for option in options_of(arguments):
        assert f'"{option}"' in source, f"{script} has no {option}"


def check_make(words):
    makefile = (ROOT / "Makefile").read_text()
    for word in words[1:]:
        variable = re.match(r"(\w+)=", word)
        assert re.search(rf"^{variable[1]} \?=" if variable else rf"^{word}:", makefile, re.M), f"the Makefile has no {word}"


def check_ours(words):
    command = cli.main.commands[words[1]]
    if isinstance(command, click.Group):
        command = command.commands[words[2]]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert set(options_of(words[2:])) <= known, f"hvd-quant {words[1]} has no {set(options_of(words[2:])) - known}"


def check_pip(words):
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\.\[(.*)\]", " ".join(words)):
        assert all(re.search(rf"^{one} = \[", pyproject, re.M) for one in extra.split(","))


def check(words):
    if words[0] == "chrt":
        words = words[3:]
    checks = {"horovodrun": check_horovodrun, "python": check_python, "make": check_make, "hvd-quant": check_ours, "pip": check_pip}
    if words[0] in checks:
        checks[words[0]](words)
    else:
        assert words[0] in TAKEN_FOR_GRANTED or (ROOT / words[0]).is_file(), f"what is {words[0]}?"


@pytest.mark.parametrize("page", docs.PAGES, ids=docs.name_of)
def test_commands(page):
    for words in commands(page):
        check(words)


def test_commands_that_need_nothing_of_the_readers_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran = []
    for page in docs.PAGES:
        for words in commands(page):
            asks_for_more = {"--model", "--file", "--import"} & set(words) or words[1:2] == ["plan"] and "--rate" not in words
            if words[0] == "hvd-quant" and words[1] in ("list", "show", "plan") and not asks_for_more:
                done = CliRunner().invoke(cli.main, words[1:])
                assert done.exit_code == 0, f"{docs.name_of(page)}: {words}: {done.output}"
                ran.append(words[1])
    assert {"list", "show", "plan"} == set(ran)


def test_the_entry_point_of_a_package():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    (block,) = docs.fenced(ALL["docs/own.md"], "toml")
    assert tomllib.loads(block) == {"project": {"entry-points": {registry.ENTRY_POINTS: {"sign": "my_package:Sign"}}}}


def test_shell_parses():
    script = "\n".join(block for page in docs.PAGES for block in docs.fenced(page, "bash"))
    parsed = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert parsed.returncode == 0, parsed.stderr


def test_the_manifest_for_kubernetes():
    yaml = pytest.importorskip("yaml")
    (manifest,) = docs.fenced(ALL["docs/launch.md"], "yaml")
    job = yaml.safe_load(manifest)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][kind] for kind in ("Launcher", "Worker"))
    (container,) = launcher["template"]["spec"]["containers"]
    assert container["command"][container["command"].index("-np") + 1] == str(worker["replicas"] * job["spec"]["slotsPerWorker"])


# -------------------------------------------------------------------------------------------------- what else pages repeat

def said():
    """All text of the package and of Horovod's optimizers, with strings that are broken over lines put together."""
    horovod = pytest.importorskip("horovod")
    files = [*(ROOT / "hvd_quant").rglob("*.py"), ROOT / "setup.py", Path(horovod.__file__).parent / "torch" / "optimizer.py"]
    return re.sub(r'"\s*\n?\s*f?"', "", "\n".join(path.read_text() for path in files))


def test_errors_in_troubleshooting_are_ours():
    source = re.sub(r"\{[^{}]*\}", "…", said())
    for cell in re.findall(r"^\| (`.*?) \|", ALL["docs/troubleshooting.md"].read_text(), re.M):
        for quoted in re.findall(r"`([^`]*)`", cell.partition("(or")[0]):
            for part in re.split(r"\.\.\.|\d+(?: and \d+)?", quoted):
                assert len(part.strip()) < 5 or part.strip() in source or part.strip().startswith("horovodrun"), part


def test_figures_are_those_of_their_pages():
    mnist = ALL["docs/mnist.md"].read_text()
    rows = re.findall(r"^\| `.* % \|.*$", ALL["docs/choosing.md"].read_text(), re.M)
    assert len(rows) == 4 and all(row in mnist for row in rows)


def test_the_readme_links_to_each_page():
    linked = set(re.findall(r"\]\((docs/[^)#]+)", ALL["README.md"].read_text()))
    assert {name for name in ALL if re.fullmatch(r"docs/(\w+|schemes/README|benchmarks/README)\.md", name)} <= linked


def test_pictures_are_what_the_script_draws(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import pictures
    finally:
        sys.path.pop(0)
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    for draw in (pictures.allgather, pictures.sra, pictures.payloads, pictures.choosing):
        draw()
    for path in tmp_path.iterdir():
        assert path.read_text() == (ROOT / "docs" / "images" / path.name).read_text(), "run python docs/pictures.py"
