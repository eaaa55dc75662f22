"""One kind of error: a mistake the user can mend, told in one line."""


class UserError(ValueError):
    """Says what came, what was wanted, and what to do."""


class Refused(UserError):
    """The system had no room for it now, so nothing is known of the file itself."""
