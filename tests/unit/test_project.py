"""The project's own files: one version, and workflows and hooks that call what exists, with few rights."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

import mcore_convert
from mcore_convert.version import VERSION
from tests.kinds import KINDS, ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted(path.name for path in (GITHUB / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, re.M))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def workflow(name: str) -> dict[Any, Any]:
    """Return a parsed workflow. YAML 1.1 reads its key `on` as true."""
    content: dict[Any, Any] = yaml.safe_load((GITHUB / "workflows" / name).read_text())
    return content


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


def test_the_version_stands_once() -> None:
    """Packaging reads it from the file that the library imports."""
    assert mcore_convert.__version__ == VERSION
    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert f'VERSION = "{VERSION}"' in (ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]).read_text()


def test_there_are_three_workflows() -> None:
    assert WORKFLOWS == ["ci.yml", "docs.yml", "release.yml"]
    assert {True: {"push": {"tags": ["v*"]}}}.items() <= workflow("release.yml").items()
    assert set(workflow("ci.yml")[True]) == {"push", "pull_request", "schedule"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_call_targets_that_exist(name: str) -> None:
    """Every `make` of a step has its target, and checks are made by the Makefile alone."""
    commands = [step["run"] for step in steps(name) if "run" in step]
    words = [word for command in commands if command.startswith("make ") for word in command.split(" #")[0].split()[1:]]
    called = {word for word in words if "=" not in word}
    assert called
    assert called <= TARGETS
    assert not [command for command in commands if re.search(r"\b(pytest|ruff|mypy|mkdocs)\b", command)]


def test_what_each_workflow_runs() -> None:
    runs = {
        name: [step["run"].split()[1] for step in steps(name) if "make " in step.get("run", "")] for name in WORKFLOWS
    }
    assert runs == {
        "ci.yml": ["check", "test", "wide", "docs", "dist"],
        "docs.yml": ["docs"],
        "release.yml": ["test", "wide", "sbom"],
    }
    for job in ("check", "test"):
        assert workflow("ci.yml")["jobs"][job]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_rights_are_few(name: str) -> None:
    """By commits, since a tag can be moved; the comment says which version that is."""
    content = workflow(name)
    assert content["permissions"] == {"contents": "read"}
    named = re.findall(r"uses: (\S+)(?: # v\d+\.\d+\.\d+.*)$", (GITHUB / "workflows" / name).read_text(), re.M)
    assert named == [step["uses"] for step in steps(name) if "uses" in step]
    for step in steps(name):
        if "uses" in step:
            assert re.search(r"@[0-9a-f]{40}$", step["uses"]), step["uses"]
            if step["uses"].startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert all(job.get(key) for key in ("runs-on", "steps"))


def test_only_publishing_may_write() -> None:
    writes = {
        (name, job, right)
        for name in WORKFLOWS
        for job, content in workflow(name)["jobs"].items()
        for right, level in content.get("permissions", {}).items()
        if level == "write"
    }
    assert writes == {
        ("docs.yml", "publish", "pages"),
        ("docs.yml", "publish", "id-token"),
        ("release.yml", "build", "id-token"),
        ("release.yml", "build", "attestations"),
        ("release.yml", "pypi", "id-token"),
        ("release.yml", "github", "contents"),
    }


def test_a_release_is_attested_and_uses_no_stored_token() -> None:
    used = [step["uses"].partition("@")[0] for step in steps("release.yml") if "uses" in step]
    assert {"actions/attest-build-provenance", "actions/attest-sbom", "pypa/gh-action-pypi-publish"} <= set(used)
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text()
    assert workflow("release.yml")["jobs"]["pypi"]["environment"] == "pypi"


def test_a_release_has_what_verifies_it() -> None:
    """Packages, their SBOM, checksums and signed statements: what SECURITY.md tells users to look for."""
    release = (GITHUB / "workflows" / "release.yml").read_text()
    security = (ROOT / "SECURITY.md").read_text()
    for name in ("SHA256SUMS", "provenance.sigstore.json", "sbom.sigstore.json", "sbom.cdx.json"):
        assert f"release/{name}" in release or "build/sbom.cdx.json release/" in release
        assert f"`{name}`" in security
    kept = [step["with"]["name"] for step in steps("release.yml") if "upload-artifact@" in step.get("uses", "")]
    (publish,) = [step["run"] for step in steps("release.yml") if "gh release create" in step.get("run", "")]
    assert kept == ["packages", "attestations"]
    assert all(f"release/{name}/*" in publish for name in kept)


def test_commits_of_actions_are_kept_fresh() -> None:
    config = yaml.safe_load((GITHUB / "dependabot.yml").read_text())
    assert {"github-actions"} <= {update["package-ecosystem"] for update in config["updates"]}


def test_security_names_what_exists() -> None:
    """Its links lead somewhere, and each promise names tests that are there."""
    text = (ROOT / "SECURITY.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    named = re.findall(r"`(test_[a-z_]+)`", text)
    there = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(named) > 10
    assert set(named) <= there


def test_issue_forms_are_forms() -> None:
    """GitHub shows none that lacks one of these, without saying so."""
    for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            assert form == {"blank_issues_enabled": True}
            continue
        assert form["name"]
        assert form["description"]
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields) > 1
        assert all(field["attributes"]["label"] for field in fields)


def test_pre_commit_runs_the_tools_of_the_makefile() -> None:
    """The same programs of the same environment, so that their versions stand in constraints.txt alone."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert [hook["id"] for hook in hooks] == ["ruff", "ruff-format", "mypy"]
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert all(hook["entry"].replace(".venv/bin", "$(BIN)").split(" --")[0] in MAKEFILE for hook in hooks)


def test_contributing_names_what_exists() -> None:
    """Its targets, its files and the kinds of tests."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"`make ([a-z]+)`", text)) >= {"check", "test", "docs", "bench"}
    assert set(re.findall(r"(?:^\$ |`)make ([a-z]+)", text, re.M)) <= TARGETS
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    for kind in KINDS:
        assert f"| `{kind}` |" in text


def test_constraints_pin_each_package_once() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    assert not [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)]
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert len(set(names)) == len(names)
    assert {"mkdocs", "mkdocs-material", "mkdocstrings", "build", "cyclonedx-bom"} <= set(names)
