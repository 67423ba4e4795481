from pathlib import Path

from megarl.convert.job import Job, Message, parse_job, parse_message
from megarl.core.layout import Layout
from megarl.models.hf_dtypes import Dtypes


def test_a_job_travels_as_a_line():
    layout = Layout(tp=2, pp=2, first_stage_layers=1, world_size=8)
    dtypes = Dtypes("bfloat16", {"model.norm.weight": "float32"})
    job = Job("reshard", Path("/a b"), Path("/c"), Path("/a b/hf"), layout, dtypes, False, 1234, 9.5, True)
    assert "\n" not in job.dump()
    assert parse_job(job.dump()) == job


def test_messages_travel_as_lines():
    for message in (
        Message("phase", "two\nlines", total=3),
        Message("verified", done=2, differences=(("a", "b", "c", "d"),)),
    ):
        assert "\n" not in message.dump()
        assert parse_message(message.dump()) == message
