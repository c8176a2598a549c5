"""The client's overhead is measured on a null server in the same process."""

import asyncio

from lmchat.cli.bench.serving.null_server import NullLoad, client_overhead


def test_the_overhead_has_the_figures_of_the_streams():
    async def main():
        return await client_overhead(NullLoad(3, 0.2), 0.1, "hi", asyncio.Event())

    found = asyncio.run(main())
    assert found["streams"] == 3
    assert found["events_per_second"] > 0
    assert found["cpu_per_event"] > 0
    assert found["ttft"]["count"] >= 3
    assert found["itl"]["count"] == found["ttft"]["count"] * (NullLoad(3, 0.2).events - 1)
    # The server never sends before the time, so added latency cannot be negative.
    assert found["ttft"]["median"] > 0
    assert found["lag"]["max"] >= found["lag"]["median"]


def test_a_stop_ends_it():
    async def main():
        stop = asyncio.Event()
        stop.set()
        return await client_overhead(NullLoad(3, 0.2), 3600.0, "hi", stop)

    assert asyncio.run(main()) is None
