"""One kind of error: a mistake that the user can fix, reported in one line."""


class UserError(ValueError):
    """States what was received, what was expected and what to do.

    A message names settings and arguments as Python callers write them, between backticks:
    "lower `train.batch`", "choose another `out`", "try `device='cpu'`". The command line turns
    these into its flags (`--train.batch`, `--out`, `--device cpu`); commands such as
    `vitrail resume RUN` stay as they are.

    >>> vitrail.preset("S/17")
    Traceback (most recent call last):
    vitrail.errors.UserError: no model is called 'S/17'; the nearest are S/16, S/32, L/16
    """


class OutOfResources(UserError):
    """The system ran out of memory or file handles: the file itself may be intact."""


class TooLarge(UserError):
    """A file or image that exceeds a limit."""
