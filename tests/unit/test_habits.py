"""What other programs read here: workflows, templates, hooks, the citation. What they name is there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_versions import PROJECT, ROOT, pins

GITHUB = ROOT / ".github"
PAGES = ROOT / "notebooks" / "docs"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
FIELDS = {"textarea", "input", "dropdown", "checkboxes", "markdown"}
CITATION = {
    *("cff-version", "message", "title", "abstract", "type", "authors", "version", "license", "keywords"),
    *("date-released", "url", "repository-code", "doi", "identifiers", "preferred-citation"),
}
"""Keys of the Citation File Format 1.2.0 that this project may use."""


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps_of(workflow: Any) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def commands_of(workflow: Any) -> str:
    """Return all that a workflow runs, with what its matrices put in."""
    commands = [step.get("run", "") for step in steps_of(workflow)]
    return "\n".join([*commands, *(row.get("command", "") for row in rows_of(workflow))])


def rows_of(workflow: Any) -> list[dict[str, str]]:
    """Return the rows of all matrices of a workflow."""
    matrices = [job.get("strategy", {}).get("matrix", {}) for job in workflow["jobs"].values()]
    return [row for matrix in matrices for row in matrix.get("include", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_the_form_that_is_read_and_runs_what_is_there(path):
    workflow = loaded(path)
    # To YAML 1.1 the key `on` is a truth value.
    assert set(workflow) == {"name", True, "permissions", "jobs"} | (set(workflow) & {"concurrency"})
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job.get("needs", "build") in {"build", *workflow["jobs"]}
        assert set(job.get("permissions", {})) <= {"pages", "id-token"}, (
            "write access to nothing but the site"
        )
        assert job["runs-on"].startswith("ubuntu-")
        assert job["timeout-minutes"] > 0
    for step in steps_of(workflow):
        assert ("run" in step) != ("uses" in step)
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v4"))
        assert step.get("with", {}).get("python-version", "3.11") in {"3.11", "${{ matrix.python }}"}
    named = re.findall(r"(?<![\w./-])((?:tests|\.ci)(?:/[\w.-]+)+)", commands_of(workflow))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_ci_calls_the_script_that_contributors_run():
    assert ".ci/run" in commands_of(loaded(GITHUB / "workflows" / "ci.yml"))


def test_the_wheel_is_installed_with_the_oldest_and_the_newest_of_all_by_each_python_that_is_named():
    rows = [row for row in rows_of(loaded(GITHUB / "workflows" / "ci.yml")) if "resolution" in row]
    assert {"lowest-direct", "highest"} == {row["resolution"] for row in rows}
    named = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if " :: 3." in each}
    assert {row["python"] for row in rows if row["resolution"] == "highest"} == named
    slow = commands_of(loaded(GITHUB / "workflows" / "slow.yml"))
    lanes = set(re.findall(r"torch_versions/lane -p (\S+) ", slow))
    assert lanes == named - {"3.11"}, "3.11 has all other lanes"


def test_the_files_that_other_versions_of_torch_are_tried_with_are_there():
    script = (ROOT / "tests" / "torch_versions" / "lane").read_text()
    named = re.search(r"^PART=\(([^)]+)\)", script, re.MULTILINE)
    assert named is not None
    assert [each for each in named[1].split() if not (ROOT / f"tests/ranks/test_{each}.py").exists()] == []


def test_the_site_is_built_there_as_its_settings_say_and_with_the_rights_it_needs():
    workflow = loaded(GITHUB / "workflows" / "docs.yml")
    (command,) = re.findall(r"`(sphinx-build [^`]+)`", (ROOT / "notebooks" / "conf.py").read_text())
    assert command in commands_of(workflow)
    assert workflow["jobs"]["deploy"]["permissions"] == {"pages": "write", "id-token": "write"}


def test_the_slow_workflow_has_the_lanes_of_the_contributors():
    """But for benchmarks, which need a machine with nothing else running, and for real GPUs."""
    text = (PAGES / "testing.md").read_text()
    section = text.partition("## The slow lanes")[2].partition("\n## ")[0]
    lanes = [line.split("|")[-2].strip().strip("`") for line in section.splitlines() if line.endswith("` |")]
    assert len(lanes) > len(WORKFLOWS)
    run = commands_of(loaded(GITHUB / "workflows" / "slow.yml")).replace(".venv/bin/", "")
    missing = [each for each in lanes if each.replace(".venv/bin/", "") not in run]
    assert [
        each for each in missing if "test_benchmarks.py" not in each and not each.endswith("-m gpu")
    ] == []


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_asks_for(path):
    form = loaded(path)
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels", "title"}
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    for field in form["body"]:
        assert field["type"] in FIELDS
        assert field["attributes"]["label"]
        assert field["type"] != "dropdown" or field["attributes"]["options"]


def test_the_commit_hooks_use_the_ruff_of_ci():
    (hooks,) = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert hooks["rev"] == f"v{pins('constraints.txt')['ruff']}"
    assert [hook["id"] for hook in hooks["hooks"]] == ["ruff-check", "ruff-format"]


BINDER = ROOT / "binder"


def test_a_binder_has_the_torch_of_ci_and_what_the_quickstart_imports():
    """Names and versions as repo2docker reads them: requirements.txt, runtime.txt, postBuild."""
    lines = (BINDER / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith(("#", "--"))]
    assert f"torch=={pins('constraints.txt')['torch']}+cpu" in wanted
    assert {re.split("[=>]", line)[0] for line in wanted} >= {
        "torch",
        "jupyterlab",
        "matplotlib",
        "scikit-learn",
    }
    python = (BINDER / "runtime.txt").read_text().strip()
    assert f"Programming Language :: Python :: {python.removeprefix('python-')}" in PROJECT["classifiers"]
    script = BINDER / "postBuild"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    opened = re.findall(r"/tree/(\S+\.ipynb)", script.read_text())
    assert [each for each in opened if not (ROOT / each).is_file()] == []
    assert len(opened) == 1


def test_the_citation_is_of_this_version():
    citation = loaded(GITHUB / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation) <= CITATION
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == PROJECT["name"]
    assert str(citation["version"]) == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    assert ".github/CITATION.cff" in (PAGES / "maintaining.md").read_text()


def test_what_security_promises_names_what_the_options_are_called():
    text = (GITHUB / "SECURITY.md").read_text()
    from nblaunch.options.launch import OPTIONS

    known = {spelling for each in OPTIONS for spelling in each.spellings}
    assert set(re.findall(r"--[a-z-]+", text)) <= known


def test_the_pull_request_template_and_the_release_name_files_that_are_there():
    release = (PAGES / "maintaining.md").read_text().partition("## A release")[2]
    text = (GITHUB / "PULL_REQUEST_TEMPLATE.md").read_text() + release
    named = re.findall(r"[\w./-]+\.(?:md|py|toml|cff)\b", text)
    assert len(named) > len(WORKFLOWS)
    assert [name for name in named if not any((top / name).is_file() for top in (ROOT, PAGES))] == []
