"""Reports on data, plans, runs and verifications, as terminal tables, JSON and one HTML page.

Every report is plain numbers under stable names (`to_dict()`); a `*_view` function draws them with rich, and `page.py`
draws them as HTML. Nothing is printed here.
"""

from treewise.report.analysis.facts import inspect_forests
from treewise.report.analysis.plan_facts import BudgetMemory, fit_of, report_budgets, report_plan
from treewise.report.analysis.run_log import RunReport, read_run
from treewise.report.terminal import (
    bill_view,
    budgets_view,
    fit_view,
    inspect_view,
    mesh_view,
    plan_view,
    run_view,
    verdict_view,
    verification_view,
)

__all__ = [
    "BudgetMemory",
    "RunReport",
    "bill_view",
    "budgets_view",
    "fit_of",
    "fit_view",
    "inspect_forests",
    "inspect_view",
    "mesh_view",
    "plan_view",
]
__all__ += ["read_run", "report_budgets", "report_plan", "run_view", "verdict_view", "verification_view"]
