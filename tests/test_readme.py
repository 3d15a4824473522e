"""Every command and every Python block of the README works as printed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("qkexp")]


def make(*args: str) -> str:
    return subprocess.run(["make", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with short sweeps under the names that the README uses."""
    folder = tmp_path_factory.mktemp("readme")
    short = ["train.steps=25", "tracker=none", "attention=none,layernorm"]
    for command in (["reproduce", "vit22b", "--quick", *short],):
        subprocess.run([sys.executable, "-m", "qkexp", *command], cwd=folder, capture_output=True, check=False)
    assert (folder / "outputs" / "vit22b" / "plan.json").exists()
    return folder


def test_readme_opens_with_the_two_commands_and_the_figure() -> None:
    first = blocks("bash")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make reproduce", "make test"]
    image = re.search(r"!\[.+\]\((.+?)\)", README)
    assert image is not None
    assert (ROOT / image.group(1)).stat().st_size > 50_000


@pytest.mark.parametrize("command", commands())
def test_readme_command_runs(command: str, workspace: Path) -> None:
    words = command.split()
    assert words[0] == "qkexp"
    extra: list[str] = []
    if words[1] in ("reproduce", "train", "sweep"):
        extra = ["tracker=none"]
    if words[1] == "reproduce":  # the recipe takes minutes: its plan is what can be checked here
        extra += ["--plan"]
    done = subprocess.run(
        [sys.executable, "-m", "qkexp", *words[1:], *extra], cwd=workspace, capture_output=True, text=True, timeout=300
    )
    expected = (0, 1) if words[1] == "verify" else (0,)  # 25 steps do not bear the claims out
    assert done.returncode in expected, done.stdout + done.stderr


def test_readme_python_blocks_run(workspace: Path) -> None:
    for block in blocks("python"):
        done = subprocess.run([sys.executable, "-c", block], cwd=workspace, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_relative_links_of_the_documents_exist() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_every_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    listed = set(re.findall(r"make ([a-z-]+)", make("help")))
    assert {"help", "install", "reproduce", "test", "check", "bench"} <= targets == listed


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_test_is_what_ci_runs_and_what_the_readme_says() -> None:
    assert "-m pytest" in make("--dry-run", "test", "VENV=/nonexistent")
    assert re.search(r"make .*check test", (ROOT / ".ci" / "run").read_text())
    assert "make test" in README


def test_metrics_page_is_generated_from_the_table() -> None:
    from qkexp.probe.metrics import markdown

    assert (ROOT / "docs" / "metrics.md").read_text() == markdown()
