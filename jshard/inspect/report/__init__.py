"""`jshard report`: a page on layouts and on the costs of a step."""

from __future__ import annotations

from jshard.inspect.report.html_report import Report as Report
from jshard.inspect.report.html_report import report as report
