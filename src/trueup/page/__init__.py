"""A report as one page: `trueup report FILE -o report.html`. Nothing is loaded from anywhere, nothing in it runs
but its own few lines, and whatever a file says is shown as text."""

from trueup.page.page import render, write

__all__ = ["render", "write"]
