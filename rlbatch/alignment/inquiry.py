"""`Inquiry`: which segments of one batch are worth a look, and what is found on them.

The table decides what is suspect, at no cost; only suspects are copied to the host and diagnosed.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence, Rows
from rlbatch.alignment.hypotheses import EXACT, SINGLE, Hypothesis, first_found, off_from
from rlbatch.alignment.hypotheses.own_list import is_of_places, of_either, of_trainer
from rlbatch.alignment.hypotheses.passes import LEAK_FIRST_TOKENS, LEAK_LEAST, leak_by_index
from rlbatch.alignment.hypotheses.places import shifted_by_rule
from rlbatch.alignment.lags import whole_shift
from rlbatch.alignment.limits import (
    COMPANY_MIN,
    FLOOR_MOST,
    LAG_ACCEPTED_SHARE,
    OUTLIER_TOKEN,
    PEERS_MIN_TOKENS,
    SUSPECT_FACTOR,
    SUSPECT_MEAN,
)
from rlbatch.alignment.logits import LogitsFor
from rlbatch.alignment.measure import COLUMN, Measured
from rlbatch.alignment.scene import Scene, place_of, usual_mean
from rlbatch.alignment.subtle_limits import SIDE_ACQUITTED
from rlbatch.errors import Finding
from rlbatch.soundness.values import POSITIVE_TOLERANCE


@dataclass(kw_only=True, eq=False)
class Inquiry:
    """One measured batch under suspicion."""

    measured: Measured
    table: NDArray[np.float64]
    """[G, stats]."""
    comparable: NDArray[np.bool_]
    """[G]."""
    ages: NDArray[np.int64]
    """[G] versions."""
    logits_for: LogitsFor | None
    _scene: Scene | None = field(default=None)
    _evidence: dict[int, Evidence] = field(default_factory=dict)
    _rows: Rows | None = field(default=None)

    def exact(self) -> dict[int, Finding]:
        """What exact hypotheses find, by segment; at most one finding each."""
        if not self._suspects:
            return {}
        shifts = {
            index: shift for index, each in self._suspects.items() if (shift := whole_shift(each)) is not None
        }
        told: dict[int, Finding] = {}
        if len(shifts) > 1:
            told = shifted_by_rule(self._suspects, shifts, self._everyone().everyone)
        return self._whose(self._with(told, EXACT, set()))

    def single(self, told: Collection[int]) -> dict[int, Finding]:
        """What is found of suspects besides those of which something is told already."""
        found = self._with({}, SINGLE, set(told))
        return found if told else self._leaks(found)

    def _whose(self, told: dict[int, Finding]) -> dict[int, Finding]:
        """The same, told of the trainer's list where its logits say so; of either where nobody is asked."""
        places = [at for at, found in told.items() if is_of_places(found)]
        if not any(self.evidence(at).ask is not None for at in places):
            return told | self._either({at: told[at] for at in places})
        whose = dict(told)
        acquitted = 0
        for at in places:
            whose[at] = of_trainer(told[at], self.evidence(at))
            acquitted += whose[at] is told[at]
            if acquitted == SIDE_ACQUITTED and acquitted == places.index(at) + 1:
                break
        return whose

    def _either(self, told: dict[int, Finding]) -> dict[int, Finding]:
        """Whole lists that are out of place alike: two lists alone do not say which of them is."""
        heard = int((self._column("num_compared") >= PEERS_MIN_TOKENS).sum())
        alike = len({(found.code, found.likely) for found in told.values()}) == 1
        if not alike or len(told) < max(COMPANY_MIN, heard):
            return told
        return {at: of_either(found) for at, found in told.items()}

    def _with(
        self, told: dict[int, Finding], hypotheses: tuple[Hypothesis, ...], without: set[int]
    ) -> dict[int, Finding]:
        for index, evidence in self._suspects.items():
            if index in told or index in without:
                continue
            found = first_found(evidence, hypotheses)
            if found is not None:
                told[index] = found
        return told

    @cached_property
    def _suspects(self) -> dict[int, Evidence]:
        return {index: self.evidence(index) for index in np.flatnonzero(self._suspect()).tolist()}

    def evidence(self, index: int) -> Evidence:
        """What there is on one segment."""
        if self._scene is None:
            self._scene = Scene.of(self.measured, self._floor(), self.logits_for)
        if index not in self._evidence:
            self._evidence[index] = self._scene.evidence(
                index,
                self._everyone,
                comparable=bool(self.comparable[index]),
                current=bool(self.ages[index] == 0),
            )
        return self._evidence[index]

    def _everyone(self) -> Rows:
        if self._rows is None:
            self._rows = Rows.of(self.evidence(index) for index in range(len(self.table)))
        return self._rows

    def _floor(self) -> float | None:
        """What noise leaves in a segment, nats, by the segments themselves; None where it cannot be told."""
        usual = usual_mean(self.table, self.comparable)
        return None if usual is None or usual > FLOOR_MOST else usual

    def _suspect(self) -> NDArray[np.bool_]:
        """[G]; segments with a window that some hypothesis may explain. Cheap, and wide on purpose."""
        floor = self._floor()
        least = SUSPECT_MEAN if floor is None else max(SUSPECT_MEAN, SUSPECT_FACTOR * floor)
        anyway = (
            (self._column("num_trainer_not_finite") > 0)
            | (self._column("max_inference") > POSITIVE_TOLERANCE)
            | (self._column("max_window_lag_gain") > 1 - LAG_ACCEPTED_SHARE)
        )
        # Values of another distribution are off, and may be 0 or absent, without any fault.
        if_comparable = (
            (self._column("num_inference_not_finite") > 0)
            | (self._column("num_zeros") > 0)
            | (self._column("max_abs_log_ratio") > OUTLIER_TOKEN)
            | (self._column("max_window_residual") >= least)
            | self._outliers(floor)
        )
        suspect: NDArray[np.bool_] = anyway | (self.comparable & if_comparable)
        return suspect

    def _column(self, name: str) -> NDArray[np.float64]:
        column: NDArray[np.float64] = self.table[:, COLUMN[name]]
        return column

    def _outliers(self, floor: float | None) -> NDArray[np.bool_]:
        """[G]; segments far above what is usual among their peers, however little that is."""
        count = self.table[:, COLUMN["num_compared"]]
        if floor is None:
            return np.zeros(len(count), bool)
        outlier: NDArray[np.bool_] = (count >= PEERS_MIN_TOKENS) & (
            self.table[:, COLUMN["sum_abs_log_ratio"]] >= off_from(floor) * count
        )
        return outlier

    def _leaks(self, told: dict[int, Finding]) -> dict[int, Finding]:
        """With `boundary-leak` in place of what the sequences of a pack that leaks are told of one by one."""
        batch = self.measured.batch
        if batch.layout != "packed" or not self.comparable.all():
            return told
        all_tokens, all_off = (self.table[:, COLUMN[name]] for name in ("num_compared", "sum_abs_log_ratio"))
        if (all_off < LEAK_LEAST * all_tokens).all():
            return told
        owners = np.array([batch.sequence_of(part) for part in batch.host_segments], int)
        count, total = (
            np.bincount(owners, weights=self.table[:, COLUMN[name]], minlength=len(batch.refs))
            for name in ("num_compared", "sum_abs_log_ratio")
        )
        heard = np.flatnonzero(count >= PEERS_MIN_TOKENS)
        named = {found.code for found in told.values()} - {"unexplained", "trainer-logprobs-differ"}
        # A few tokens may all be certain, and agree better than those of any other row.
        if named or count[0] < LEAK_FIRST_TOKENS:
            return told
        means = (total[heard] / count[heard]).tolist()
        at = int(np.flatnonzero(owners == heard[-1])[0])
        leak = leak_by_index(means, where=place_of(batch, at, self.measured.number))
        return told if leak is None else {at: leak}
