"""A request's body: bounded, complete in time, JSON of bounded depth."""

from __future__ import annotations

from typing import Any

import pydantic_core
import trio
from starlette.requests import ClientDisconnect, Request

from meshinfer.api.errors import BodyTooLarge
from meshinfer.api.validation import shown
from meshinfer.base.errors import BadInput, DeadlineExceeded
from meshinfer.base.units import format_bytes

# 32 MiB over a poor 5 Mbit/s uplink take 54 s.
READ_SECONDS = 60.0

# A client that is still sending when we close its connection sees a reset instead of our answer, so what is
# too large is read on and dropped for a while.
DRAIN_SECONDS = 10.0


async def read_json_object(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The JSON object in the body.

    Raises:
        BodyTooLarge: over `limit_bytes`.
        BadInput: not JSON, nested more than 200 deep, or not an object.
        DeadlineExceeded: the client did not send it in time.
    """
    data = await _read(request, limit_bytes)
    try:
        # Bounded depth, no NaN, no lone surrogates; the standard library allows all three.
        value = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise BadInput(f"the body is not JSON that we take: {error}", expected="a JSON object in UTF-8") from error
    if not isinstance(value, dict):
        raise BadInput(f"the body is {shown(value)}", expected="a JSON object")
    return value


async def _read(request: Request, limit_bytes: int) -> bytes:
    data, too_large = bytearray(), False
    try:
        with trio.fail_after(READ_SECONDS) as scope:
            async for chunk in request.stream():
                if too_large:
                    continue
                data += chunk
                if len(data) > limit_bytes:
                    too_large = True
                    data.clear()
                    scope.deadline = min(scope.deadline, trio.current_time() + DRAIN_SECONDS)
    except ClientDisconnect:
        raise BadInput("the client left before its body was complete") from None
    except trio.TooSlowError:
        if not too_large:
            raise DeadlineExceeded(f"the body was not complete after {READ_SECONDS:.0f} s") from None
    if too_large:
        raise BodyTooLarge(
            f"the body has more than {format_bytes(limit_bytes)}",
            expected=f"at most {limit_bytes} bytes",
            do="send a shorter conversation, or raise api_body_limit_bytes",
        )
    return bytes(data)
