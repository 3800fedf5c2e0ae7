"""The number of rows that each call of steps verifies, and the program for it.

Where the rows of a step are chosen, reports of calls say what a number of rows came to; see
jflash.budget.row_choice. This file knows programs and reports, and no request.
"""

from typing import Any

import numpy as np

from jflash.budget.rounds import Round
from jflash.budget.row_choice import ChosenRows
from jflash.pair import Models, Params
from jflash.records.kernels import AUTO
from jflash.serving.calls.first_runs import choosing
from jflash.serving.calls.layout import Layout
from jflash.serving.calls.packing import Report, surveyed
from jflash.serving.calls.programs import Programs
from jflash.serving.calls.some_slots import Stepping


class StepPrograms:
    """The programs of steps of one layout, which is settled."""

    def __init__(self, models: Models, params: Params, layout: Layout, programs: Programs) -> None:
        self.programs, self._width, self._usual = programs, models.block_size, layout.steps
        self.rows = dict[int, ChosenRows]()  # by slots, if the rows of a step are chosen
        if models.rows == AUTO and "greedy" in layout.kinds:
            self.rows = choosing(models, params, layout, programs)
        self._steps = dict.fromkeys(sorted({each.rows for each in programs.greedy}), 0)

    def pick(self, slots: int, live: int, drawn: bool) -> tuple[Stepping, Any]:
        """The program of a call of so many slots, of which `live` have a text. `drawn`: some of
        these texts need one for requests of every kind, as all do if there are no others."""
        programs = self.programs
        if programs.drawn and (drawn or not programs.greedy):
            return Stepping(slots, slots * self._width), programs.drawn[slots]
        stepping = max(each for each in programs.greedy if each.slots == slots)
        if slots in self.rows:
            stepping = Stepping(slots, self.rows[slots].pick(live)[0])
        return stepping, programs.greedy[stepping]

    def learn(self, stepping: Stepping, steps: int, report: Report, during: Round) -> None:
        """Takes what a call came to, if rows are chosen; the calls come in order."""
        slots, rows = stepping
        chosen = self.rows.get(slots, self.rows[max(self.rows)])
        now = chosen.estimate.newest(surveyed(np.asarray(report.numbers), self._width, steps))
        self._steps[rows] += int(now.steps)
        if slots not in self.rows:
            chosen.estimate.add(now)
        else:
            chosen.seen(rows, now, during if steps == self._usual else None)

    def steps_by_rows(self) -> dict[int, int]:
        """How many steps verified so many rows, if they are chosen."""
        return dict(self._steps) if self.rows else {}
