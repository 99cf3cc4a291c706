"""Mixed-integer linear programs with named variables and constraints, solved by HiGHS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.errors import DeviceError, ScheduleError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["MICRO", "Model", "Outcome"]

MICRO = 1e6
"""Programs are in microseconds, for numerical range."""
GAP = 1e-3
"""The relative gap at which a solution counts as optimal."""


class Outcome(NamedTuple):
    """A solution: the value of every variable, the objective, and its proven bound."""

    values: Sequence[float]
    objective: float
    bound: float
    proven: bool

    @property
    def gap(self) -> float:
        """Return the relative gap between objective and bound."""
        return max(0.0, 1 - self.bound / self.objective) if self.objective else 0.0


class Model:
    """A program to be minimised."""

    def __init__(self) -> None:
        """Start without variables."""
        self.names: list[str] = []
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._whole: list[bool] = []
        self.rows: list[tuple[str, list[tuple[int, float]], float, float]] = []

    def binary(self, name: str, cost: float = 0.0) -> int:
        """Add a binary variable; return its number."""
        return self._add(name, cost, 0.0, 1.0, whole=True)

    def real(self, name: str, cost: float = 0.0, lower: float = 0.0, upper: float = float("inf")) -> int:
        """Add a real variable, by default not negative; return its number."""
        return self._add(name, cost, lower, upper, whole=False)

    def _add(self, name: str, cost: float, lower: float, upper: float, *, whole: bool) -> int:
        self.names.append(name)
        self._costs.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._whole.append(whole)
        return len(self.names) - 1

    def minimise(self, costs: Mapping[int, float]) -> None:
        """Replace the objective."""
        self._costs = [costs.get(number, 0.0) for number in range(len(self.names))]

    def at_most(self, name: str, terms: Sequence[tuple[int, float]], limit: float) -> None:
        """Add the constraint that a linear expression is at most `limit`."""
        self.rows.append((name, _merge_terms(terms), float("-inf"), limit))

    def exactly(self, name: str, terms: Sequence[tuple[int, float]], value: float) -> None:
        """Add the constraint that a linear expression equals `value`."""
        self.rows.append((name, _merge_terms(terms), value, value))

    def solve(
        self,
        seconds: float,
        start: Mapping[int, float] | None = None,
        progress: Callable[[float, float], None] | None = None,
    ) -> Outcome:
        """Return the best solution found in `seconds`; `start` is a feasible one.

        `progress` is called with the objective and the bound whenever the solver reports.
        """
        solver = self._loaded(seconds)
        if start is not None:
            solution = highs().HighsSolution()
            solution.col_value = [start.get(number, 0.0) for number in range(len(self.names))]
            solver.setSolution(solution)
        if progress is not None:
            solver.cbMipLogging += lambda event: progress(
                event.data_out.mip_primal_bound, event.data_out.mip_dual_bound
            )
        solver.run()
        info = solver.getInfo()
        if info.primal_solution_status != 2:
            raise ScheduleError(
                "solver",
                expected=f"a solution within {seconds:g} seconds",
                got=solver.modelStatusToString(solver.getModelStatus()),
                remedy="Give it more time, or a sketch with fewer links and more symmetry.",
            )
        proven = solver.getModelStatus() == highs().HighsModelStatus.kOptimal
        objective = info.objective_function_value
        return Outcome(list(solver.getSolution().col_value), objective, min(info.mip_dual_bound, objective), proven)

    def _loaded(self, seconds: float) -> Any:
        import numpy as np

        package = highs()
        lp = package.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.names), len(self.rows)
        lp.col_cost_ = np.array(self._costs)
        lp.col_lower_, lp.col_upper_ = np.array(self._lower), np.array(self._upper)
        lp.row_lower_ = np.array([low for _, _, low, _ in self.rows])
        lp.row_upper_ = np.array([high for _, _, _, high in self.rows])
        terms = [row[1] for row in self.rows]
        lp.a_matrix_.format_ = package.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *map(len, terms)])
        lp.a_matrix_.index_ = np.array([number for row in terms for number, _ in row], np.int32)
        lp.a_matrix_.value_ = np.array([factor for row in terms for _, factor in row], np.float64)
        kinds = package.HighsVarType
        lp.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in self._whole]
        lp.col_names_, lp.row_names_ = self.names, [row[0] for row in self.rows]
        solver = package.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("time_limit", float(seconds))
        solver.setOptionValue("mip_rel_gap", GAP)
        solver.passModel(lp)
        return solver


def _merge_terms(terms: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Merge repeated variables."""
    found: dict[int, float] = {}
    for number, factor in terms:
        found[number] = found.get(number, 0.0) + factor
    return list(found.items())


def highs() -> Any:
    """Return the solver's package, an optional dependency."""
    try:
        import highspy
    except ImportError as error:
        remedy = "Install the extra: pip install mpi_gpucomp[synth]."
        raise DeviceError("synthesis", expected="the solver HiGHS (highspy)", got="none", remedy=remedy) from error
    return highspy
