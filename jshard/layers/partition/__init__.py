"""Runs a program that was written for one device on each device's part of its arrays: one rule a primitive."""

from jshard.layers.partition.microbatches import Microbatches as Microbatches
from jshard.layers.partition.program import Input as Input
from jshard.layers.partition.program import Program as Program
