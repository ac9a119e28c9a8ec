"""Plans for people: tables in the terminal, and numbers with units."""

from whale.report.plan_table import print_plan, render_plan, summary

__all__ = ["print_plan", "render_plan", "summary"]
