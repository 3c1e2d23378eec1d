"""What goes wrong."""


class RayError(Exception):
    """All of them."""


class RayActorError(RayError):
    """An actor has ended."""


class ActorUnavailableError(RayActorError):
    """An actor cannot be heard."""


class RayTaskError(RayError):
    """A call has raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
