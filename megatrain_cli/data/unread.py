"""What rows say to other tools and nothing here reads.

Passed over, it would change what is learnt without a word: an answer about a picture that nobody
saw, an answer that was marked as bad, a call that is no turn's text. So it is refused by name. What
is empty says nothing.
"""

from collections.abc import Mapping

from megatrain_cli.data.fields import Fields

_MEDIA = dict.fromkeys(
    ("images", "videos", "audios", "image", "video", "audio"),
    "rows with more than text are not trained on",
)
COLUMNS: Mapping[str, str] = _MEDIA | {
    **dict.fromkeys(
        ("rejected", "rejected_response", "rejected_messages", "kto_tag"),
        "preferences are not trained on. Take the column out to learn the answers beside it",
    ),
    "chat_template_kwargs": "variables of the chat template cannot be given row by row. Write what "
    "they change into the turns or the template, and take the column out",
    "functions": "schemas of tools are read from `tools`, each as {type: function, function: ...}",
}
"""Columns of a chat -> why they are refused."""

_OF_TURN = _MEDIA | {
    "function_call": "calls are read from `tool_calls`: [{type: function, function: ...}]",
    "refusal": "it would not be learnt. Write it as the content of the turn",
    **dict.fromkeys(
        ("masked", "train_detail", "training_detail"),
        "it is not read. A turn that is not to be learnt has `train: false`",
    ),
}


def refuse_columns(fields: Fields) -> None:
    """Refuse a chat beside which stands more than is read.

    Raises:
        RowError: Names the column.
    """
    for name, reason in COLUMNS.items():
        if fields.get(name):
            raise fields.refuse(name, reason)
    if isinstance(fields.get("label"), bool):  # of other kinds it may be anything
        raise fields.refuse(
            "label",
            "true or false beside an answer, as in rows of preferences, which are not trained on. "
            "Keep the answers that are to be learnt, and take the column out",
        )


def refuse_keys(turn: Mapping[str, object], parts: Fields) -> None:
    """Refuse a turn that says more than is read.

    Args:
        turn: As it was read; looked at first, since turns are many and few have such keys.
        parts: The same, to name turn and key in the message.

    Raises:
        RowError: There is more.
    """
    for name in sorted(turn.keys() & _OF_TURN.keys()):
        if turn[name]:
            raise parts.refuse(name, _OF_TURN[name])
