"""What the programs that tests of plans write by hand have in common, in the forms that XLA prints."""

import re

OPENING = "HloModule jit_step, is_scheduled=true\n\n"


def opening_of(source: str, function: str) -> str:
    """The opening of a program whose frame number 1 is line 10 of `function`, in that file of the package."""
    location = "file_name_id=1 function_name_id=1 line=10 end_line=10 column=4 end_column=9"
    tables = {
        "FileNames": f'"/lib/halfbyte/{source}"',
        "FunctionNames": f'"{function}"',
        "FileLocations": f"{{{location}}}",
        "StackFrames": "{file_location_id=1 parent_frame_id=1}",
    }
    return OPENING + "\n\n".join(f"{name}\n1 {entry}" for name, entry in tables.items()) + "\n\n\n"


def condition_of(state: str) -> str:
    """A loop's condition over tuples of this type: nobody reads when it ends."""
    types = re.sub(r"\{[\d,]*\}", "", state)
    body = f"  %c = {state} parameter(0)\n  ROOT %go = pred[] constant(true)\n"
    return f"%condition (c: {types}) -> pred[] {{\n{body}}}\n\n"
