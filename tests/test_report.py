"""What is printed of an audit, from reports made by hand."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where
from rlbatch.figures import Figures
from rlbatch.report import (
    AuditReport,
    FileReport,
    Verdict,
    failure_to_json,
    findings_text,
    print_report,
    to_json,
)

# Half of the tokens at 0.1 nats, half at -0.3: k1 is the mean of -log_ratio.
FIGURES = Figures.of(np.array([0.1, -0.3, 0.1, -0.3]))


def fault(code: str = "shifted", sample: int = 17) -> Finding:
    where = Where(path="a.json", sample=sample, trajectory="[bold]t", turn=1, start=3, stop=9)
    return finding(code, where=where, expected="lag 0", found="lag [red]-1")


def file_report(verdict: Verdict, *findings: Finding, path: str = "a.json") -> FileReport:
    figures = Figures() if verdict == "unusable" else FIGURES
    return FileReport(path=path, verdict=verdict, num_samples=2, figures=figures, findings=findings)


def report(*verdicts: Verdict) -> AuditReport:
    return AuditReport(files=tuple(file_report(verdict) for verdict in verdicts))


def printed(result: AuditReport) -> str:
    out = io.StringIO()
    print_report(result, Console(width=160, file=out))
    return out.getvalue()


@pytest.mark.parametrize(
    ("verdicts", "expected", "exit_code"),
    [
        (("sound",), "sound", 0),
        (("sound", "not-judged"), "not-judged", 3),
        (("not-judged", "findings", "sound"), "findings", 1),
        (("findings", "unusable", "not-judged"), "unusable", 2),
        ((), "unusable", 2),
    ],
)
def test_of_several_files_2_comes_before_1_before_3_before_0(
    verdicts: tuple[Verdict, ...], expected: Verdict, exit_code: int
) -> None:
    assert (report(*verdicts).verdict, report(*verdicts).exit_code) == (expected, exit_code)


def test_the_json_document_has_exactly_its_keys_and_the_figures_by_hand() -> None:
    document = json.loads(to_json(AuditReport(files=(file_report("findings", fault()),))))
    figures = {
        "num_samples",
        "num_tokens",
        "k1",
        "k3",
        "inference_kld_capped",
        "max_abs_log_ratio",
        "quantiles",
    }
    assert list(document) == ["schema", "verdict", "exit_code", "total", "files", "findings"]
    assert document["schema"] == "rlbatch.audit/1"
    assert (document["verdict"], document["exit_code"]) == ("findings", 1)
    assert set(document["total"]) == figures
    assert set(document["files"][0]) == figures | {"path", "verdict"}
    assert document["total"]["num_tokens"] == 4
    assert document["total"]["k1"] == pytest.approx(0.1)
    # exp(0.1) - 1 - 0.1 = 0.005170918, exp(-0.3) - 1 + 0.3 = 0.040818221
    assert document["total"]["k3"] == pytest.approx((0.005170918 + 0.040818221) / 2)
    assert document["total"]["max_abs_log_ratio"] == pytest.approx(0.3)
    assert list(document["total"]["quantiles"]) == ["0.5", "0.9", "0.99", "0.999"]
    assert document["findings"] == [
        {
            "code": "shifted",
            "severity": "error",
            "path": "a.json",
            "sample": 17,
            "trajectory": "[bold]t",
            "turn": 1,
            "start": 3,
            "stop": 9,
            "expected": "lag 0",
            "found": "lag [red]-1",
            "likely": fault().likely,
            "fix": fault().fix,
        }
    ]


def test_totals_are_over_all_tokens_of_all_files() -> None:
    other = FileReport(
        path="b", verdict="sound", num_samples=3, figures=Figures.of(np.array([0.7])), findings=()
    )
    document = json.loads(to_json(AuditReport(files=(file_report("sound"), other))))
    assert document["total"]["num_samples"] == 5
    assert document["total"]["num_tokens"] == 5
    assert document["total"]["k1"] == pytest.approx((0.2 + 0.2 - 0.7) / 5)
    assert document["total"]["max_abs_log_ratio"] == pytest.approx(0.7)


def test_a_figure_that_is_not_finite_never_becomes_json() -> None:
    broken = FileReport(
        path="b",
        verdict="sound",
        num_samples=1,
        figures=Figures(num_tokens=1, sum_k3=float("nan")),
        findings=(),
    )
    with pytest.raises(ValueError, match="JSON compliant"):
        to_json(AuditReport(files=(broken,)))


def test_an_audit_that_could_not_begin_is_the_same_document() -> None:
    document = json.loads(failure_to_json([fault("model-mismatch")]))
    assert (document["verdict"], document["exit_code"], document["files"]) == ("unusable", 2, [])
    assert [found["code"] for found in document["findings"]] == ["model-mismatch"]
    assert set(document) == set(json.loads(to_json(report("sound"))))


@pytest.mark.parametrize(
    "verdicts", [("not-judged",), ("not-judged", "sound"), ("sound", "sound", "not-judged")]
)
def test_nothing_is_called_sound_where_part_was_not_judged(verdicts: tuple[Verdict, ...]) -> None:
    assert "sound" not in printed(report(*verdicts)).lower()
    assert "not judged" in printed(report(*verdicts))


def test_a_sound_audit_says_so() -> None:
    assert printed(report("sound")).rstrip().splitlines()[-1].startswith("sound: ")


def test_the_table_has_a_row_a_file_and_a_total() -> None:
    lines = printed(report("sound", "sound")).splitlines()
    assert lines[1].split() == ["a.json", "sound", "2", "4", "0.1", "0.023", "0.023", "0.1", "0.3", "0.3"]
    assert lines[3].split()[:4] == ["total", "sound", "4", "8"]


def test_an_unusable_file_has_no_figures() -> None:
    assert printed(report("unusable")).splitlines()[1].split() == ["a.json", "unusable", "2", "0", *"------"]


def test_findings_are_printed_as_errors_print_them_whatever_markup_they_hold() -> None:
    assert str(fault()) in printed(AuditReport(files=(file_report("findings", fault()),)))


def test_a_screen_of_findings_has_errors_first_then_one_of_each_code_and_counts_the_rest() -> None:
    warning = fault("ratio-tail", sample=1)
    findings = [warning, *(fault("shifted", sample=at) for at in range(5)), fault("zero-filled", sample=9)]
    text = findings_text(findings)
    assert [line.split("]")[0] for line in text.splitlines() if line.startswith("[")] == [
        "[shifted",
        "[zero-filled",
        "[shifted",
        "[shifted",
    ]
    assert text.splitlines()[-1] == (
        "... and 3 more of 7 findings (2 shifted, 1 ratio-tail); --format json has them all"
    )
    assert len(text.splitlines()) < 24


def test_few_findings_are_all_printed() -> None:
    text = findings_text([fault(sample=1), fault(sample=2)])
    first, second = str(fault(sample=1)), str(fault(sample=2)).partition("  likely:")[0]
    assert text == f"{first}\n{second}  likely and fix as for shifted above"
