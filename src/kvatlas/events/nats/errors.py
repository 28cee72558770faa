"""What nats-py raises, in our own errors: the only place that knows both families.

`nats_connection` applies it where exchanges with the broker end. A class that is not in the
tables would fall to its nearest base; a test holds the tables complete against the driver.
"""

from collections.abc import Callable

import nats.errors
import nats.js.errors as js

from kvatlas.schemas.errors import (
    BusUnavailable,
    InvalidInput,
    InvalidSetting,
    InvalidSubject,
    KvatlasError,
    NoResponder,
    RequestTimedOut,
    StreamRefused,
)

#: what an exchange with the broker may raise
DRIVER_ERRORS = (nats.errors.Error, OSError, TimeoutError)

#: answers of the JetStream API: the key is not at the expected revision
WRONG_LAST_SEQUENCE = (10071, 10164)
#: a stream of this name exists with other limits
STREAM_NAME_IN_USE = 10058

#: several replicas of a node that is no cluster's, or not yet
NOT_CLUSTERED = 10074

#: no node of the cluster can take a replica; nodes may come
_NO_PEERS = 10005

#: further codes -> what to change, said behind the broker's own text
_HINTS = {
    **dict.fromkeys(
        (10002, 10023, 10046, 10047),
        "too little storage: lower log.max_bytes, log.decisions_max_bytes or "
        "log.dead_letters_max_bytes, or raise max_file_store of the broker or its account",
    ),
    **dict.fromkeys(
        (10039, 10076),
        "enable JetStream for the account of nats.credentials, or name another broker with --nats",
    ),
    _NO_PEERS: "too few nodes: set log.replicas to at most the number of nodes, or wait for them",
    NOT_CLUSTERED: (
        "one node keeps one replica: set log.replicas to 1, or name a cluster with --nats"
    ),
}

#: codes of the JetStream API below 500 that a later try may survive
_RETRY_CODES = (408, 429)

_AWAY = (
    nats.errors.Error,
    nats.errors.StaleConnectionError,
    nats.errors.UnexpectedEOF,
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionClosedError,
    nats.errors.SecureConnRequiredError,
    nats.errors.SecureConnWantedError,
    nats.errors.SecureConnFailedError,
    nats.errors.SlowConsumerError,
    nats.errors.NoServersError,
    nats.errors.JsonParseError,
    nats.errors.ConnectionDrainingError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.ProtocolError,
    nats.errors.ServerNotInPoolError,
    js.Error,
    js.ServiceUnavailableError,
    js.ServerError,
    js.NoStreamResponseError,
    js.TooManyStalledMsgsError,
    js.ConsumerSequenceMismatchError,
    OSError,
)
_TIMED_OUT = (
    TimeoutError,
    nats.errors.TimeoutError,
    nats.errors.FlushTimeoutError,
    nats.errors.DrainTimeoutError,
    js.FetchTimeoutError,
)
_REFUSED = (
    nats.errors.MaxPayloadError,
    nats.errors.BadSubscriptionError,
    nats.errors.NotJSMessageError,
    nats.errors.MsgAlreadyAckdError,
    js.APIError,
    js.NotFoundError,
    js.BadRequestError,
    js.ConsumerInvalidResetError,
    js.BucketNotFoundError,
    js.BadBucketError,
    js.KeyValueError,
    js.KeyDeletedError,
    js.KeyNotFoundError,
    js.KeyWrongLastSequenceError,
    js.NoKeysError,
    js.KeyHistoryTooLargeError,
    js.InvalidBucketNameError,
    js.InvalidObjectNameError,
    js.BadObjectMetaError,
    js.LinkIsABucketError,
    js.DigestMismatchError,
    js.ObjectNotFoundError,
    js.ObjectDeletedError,
    js.ObjectAlreadyExists,
    js.KeyValueLimitMarkerTTLNotSupportedError,
)
_INVALID = (
    nats.errors.BadHeaderError,
    nats.errors.BadTimeoutError,
    nats.errors.InvalidCallbackTypeError,
    js.InvalidKeyError,
)
_CREDENTIALS = (nats.errors.AuthorizationError, nats.errors.InvalidUserCredentialsError)


def _bad_credentials(text: str) -> InvalidSetting:
    return InvalidSetting("credentials", "the broker", text)


TABLE: dict[type[BaseException], Callable[[str], KvatlasError]] = {
    **dict.fromkeys(_AWAY, BusUnavailable),
    **dict.fromkeys(_TIMED_OUT, RequestTimedOut),
    **dict.fromkeys(_REFUSED, StreamRefused),
    **dict.fromkeys(_INVALID, InvalidInput),
    **dict.fromkeys(_CREDENTIALS, _bad_credentials),
    nats.errors.NoRespondersError: NoResponder,
    nats.errors.BadSubjectError: InvalidSubject,
}


def translate(error: BaseException, what: str) -> KvatlasError:
    """Return our error for a driver's; the text says what was tried and what came back."""
    if isinstance(error, nats.errors.BadSubjectError):
        return InvalidSubject(what)
    text = f"{what}: {str(error) or type(error).__name__}"
    if isinstance(error, js.APIError) and error.err_code in _HINTS:
        text += f": {_HINTS[error.err_code]}"
    elif isinstance(error, js.ServiceUnavailableError) and not error.err_code:
        text += ": no JetStream there, or no leader of its cluster yet"
    if isinstance(error, js.APIError) and (
        may_be_retried(error.code or 0) or error.err_code == _NO_PEERS
    ):
        return BusUnavailable(text)
    return next(TABLE[base] for base in type(error).__mro__ if base in TABLE)(text)


def may_be_retried(api_code: int) -> bool:
    """Say whether an error code of the JetStream API is about now and not about the request."""
    return api_code >= 500 or api_code in _RETRY_CODES
