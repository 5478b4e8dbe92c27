"""Run a program written for one device on each device's shards: a rule for each primitive."""

from jshard.layers.partition.microbatches import Microbatches as Microbatches
from jshard.layers.partition.program import Input as Input
from jshard.layers.partition.program import Program as Program
