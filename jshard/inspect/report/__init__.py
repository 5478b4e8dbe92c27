"""`jshard report`: one page on where everything lies and what a step costs."""

from __future__ import annotations

from jshard.inspect.report.html_report import Report as Report
from jshard.inspect.report.html_report import report as report
