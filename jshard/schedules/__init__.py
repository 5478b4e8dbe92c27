"""Pipeline schedules as tables of operations by stage and tick: made, read, checked, priced, drawn. No JAX."""

from __future__ import annotations

from jshard.schedules.checker import load as load
from jshard.schedules.checker import read as read
from jshard.schedules.cost import Cost as Cost
from jshard.schedules.cost import Times as Times
from jshard.schedules.cost import sends as sends
from jshard.schedules.generators import KINDS as KINDS
from jshard.schedules.generators import generate as generate
from jshard.schedules.table import Op as Op
from jshard.schedules.table import StageOp as StageOp
from jshard.schedules.table import Table as Table
