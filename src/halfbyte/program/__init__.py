"""What a compiled program is made of, read from its text."""

from .text import Instruction, Program, parse_program, weighted_calls

__all__ = ["Instruction", "Program", "parse_program", "weighted_calls"]
