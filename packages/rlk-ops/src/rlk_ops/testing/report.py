"""The report of one candidate: a result per case, dtype and relation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """One relation on one case in one dtype.

    Attributes:
        case: the case's name.
        relation: the relation's name.
        dtype: of the floating arguments; "" for error cases.
        status: "passed", "failed" or "skipped".
        details: a sentence per difference, or the reason for the skip.
    """

    case: str
    relation: str
    dtype: str
    status: Status
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.relation} / {self.case}" + (f" / {self.dtype}" if self.dtype else "")
        return "\n".join([f"{self.status.upper()} {where}", *(f"    {text}" for text in self.details)])


@dataclass(frozen=True)
class Report:
    """What became of one candidate.

    Attributes:
        op: the operator's name.
        implementation: the candidate's name.
        device: where it ran.
        results: every result, in the order in which they were found.
    """

    op: str
    implementation: str
    device: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Nothing failed, and something was checked: a candidate that refuses everything does not pass."""
        return not self.failures and any(result.status == "passed" for result in self.results)

    @property
    def failures(self) -> tuple[Result, ...]:
        """The results that failed."""
        return tuple(result for result in self.results if result.status == "failed")

    def __str__(self) -> str:
        counts = Counter(result.status for result in self.results)
        verdict = "passed" if self.passed else "FAILED" if self.failures else "NOTHING WAS CHECKED"
        totals = ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "skipped"))
        lines = [f"{self.op} / {self.implementation} on {self.device}: {verdict} ({totals})"]
        lines += [str(result) for result in self.failures]
        return "\n".join([*lines, *self._skips()])

    def _skips(self) -> list[str]:
        reasons = Counter(
            (result.relation, "; ".join(result.details)) for result in self.results if result.status == "skipped"
        )
        return [f"skipped {relation} x {count}: {reason}" for (relation, reason), count in reasons.items()]

    def to_json(self) -> str:
        """The report as one JSON object; :meth:`from_json` reads it back."""
        return json.dumps({**asdict(self), "passed": self.passed}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that :meth:`to_json` wrote."""
        data = json.loads(text)
        results = (Result(**{**item, "details": tuple(item["details"])}) for item in data["results"])
        return cls(data["op"], data["implementation"], data["device"], tuple(results))


def join(reports: Iterable[Report]) -> str:
    """The reports, one after another."""
    return "\n\n".join(str(report) for report in reports)
