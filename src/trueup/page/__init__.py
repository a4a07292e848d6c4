"""A report as one page: it loads nothing, and whatever a file says is shown as text and does nothing."""

from trueup.page.page import render, write

__all__ = ["render", "write"]
