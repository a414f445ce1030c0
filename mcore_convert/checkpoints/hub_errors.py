"""Errors of the Hub and of the connection to it, as messages that name a remedy."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

from mcore_convert.checkpoints.download import first_line
from mcore_convert.errors import ConvertError, HubError

TOKENS = "https://huggingface.co/settings/tokens"
LOGIN = f"make a token with the role write at {TOKENS}, then `hf auth login`"
AGAIN = "run the same command again: what has arrived is not sent twice"


@contextlib.contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Scope in which the errors of the Hub's client become errors of this package.

    Args:
        what: the failed operation, for the message: `ada/model cannot be written`.

    Raises:
        HubError: in place of whatever the client, or its HTTP library, raises.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except ConvertError:
        raise
    except LocalTokenNotFoundError as error:
        raise HubError("there is no token for the Hub", hint=f"{LOGIN}, or set HF_TOKEN") from error
    except HFValidationError as error:
        raise HubError(first_line(error), hint="a repository is called NAME or OWNER/NAME") from error
    except OfflineModeIsEnabled as error:
        raise HubError("the Hub is not asked: HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE") from error
    except Exception as error:  # transfers run in threads of the client, which wraps their errors
        chain = list(_chain(error))
        answer = next((each for each in chain if isinstance(each, HfHubHTTPError)), None)
        lost = next((each for each in chain if is_connection(each)), None)
        if answer is not None and type(error) is not ValueError:  # a ValueError says more, as for a card's metadata
            raise _refusal(what, answer.response.status_code, _words(answer)) from error
        if lost is not None:
            raise HubError(f"{what}: the connection to the Hub was lost: {first_line(lost)}", hint=AGAIN) from error
        if isinstance(error, OSError | ValueError | RuntimeError):
            first, *rest = str(error).strip().splitlines() or [type(error).__name__]
            below = [] if answer is not None else [first_line(each) for each in chain[1:]]
            raise HubError(f"{what}: {first}", items=[line for line in (*rest, *below) if line.strip()]) from error
        if _is_of_client(error):
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise HubError(
                f"{what}: the Hub's answer is not one that its client reads: {reason}", hint=AGAIN
            ) from error
        raise


def _is_of_client(error: Exception) -> bool:
    """Return whether the client itself failed on the Hub's answer, not a function of this package that it called."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).split(".")[0] == "huggingface_hub"


def is_connection(error: BaseException) -> bool:
    """Return whether an error is that of a connection, not an answer of the server."""
    from huggingface_hub.errors import HTTPError

    return isinstance(error, HTTPError | ConnectionError) and not hasattr(error, "response")


def is_passing(error: BaseException) -> bool:
    """Return whether a retry may succeed: a lost connection, an overloaded server, a race."""
    from huggingface_hub.errors import HfHubHTTPError

    chain = list(_chain(error))
    codes = {each.response.status_code for each in chain if isinstance(each, HfHubHTTPError)}
    return any(map(is_connection, chain)) or bool(codes & {412, 429, 500, 502, 503, 504})


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, the innermost last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _words(error: Exception) -> str:
    """Return the server's message, or the client's if there is none."""
    message = getattr(error, "server_message", None)
    return message.strip().splitlines()[0] if isinstance(message, str) and message.strip() else first_line(error)


def _refusal(what: str, status: int, answer: str) -> HubError:
    if status == 401:
        place = (
            "HF_TOKEN, which goes before that of `hf auth login`" if os.environ.get("HF_TOKEN") else "`hf auth login`"
        )
        reason = "the Hub does not accept the token: it is invalid, or its time is up"
        return HubError(reason, items=[f"it is that of {place}"], hint=LOGIN)
    if status == 403:
        hint = f"a token needs write access to the repository's owner, see {TOKENS}; or choose an owner that is yours"
        return HubError(f"{what}: {answer}", hint=hint)
    if status == 404:
        return HubError(f"{what}: {answer}", hint="is the name right, and may the token see it?")
    if status == 409:
        return HubError(f"{what}: {answer}", hint="something of that name is there: choose another name")
    if status == 412:
        return HubError(f"{what}: someone else has just changed it", hint=AGAIN)
    if status == 429:
        return HubError(f"{what}: too many requests", hint="wait some minutes, then run the same command again")
    if status >= 500:
        return HubError(f"{what}: the Hub fails with {status}: {answer}", hint=AGAIN)
    return HubError(f"{what}: the Hub answers {status}: {answer}")
