"""One kind of error: a mistake the user can mend, told in one line."""


class UserError(ValueError):
    """Says what came, what was wanted, and what to do."""
