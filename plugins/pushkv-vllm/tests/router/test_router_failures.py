"""What a router makes of servers that fail, hang and come back, and of clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")

import aiohttp
from aiohttp import web
from router_scene import (
    Behaviour,
    Call,
    FakeServer,
    Scene,
    begun,
    decoded,
    drops,
    drops_in_the_stream,
    events,
    fails,
    fails_in_the_stream,
    once,
    prefilled,
    run,
    streams_on,
    until,
    waits,
)

STREAM = {"prompt": "a", "stream": True}


async def hangs(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError


async def hangs_in_the_stream(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
    """A stream's headers, and then nothing."""
    await begun(request)
    return await hangs(server, request, call)


def calls(servers: list[FakeServer]) -> list[Call]:
    return [call for server in servers for call in server.calls]


def test_prefills_refusal_ends_decode_and_is_the_answer() -> None:
    async def scene() -> None:
        async with Scene(prefill=2, decode=2) as stage:
            for server in stage.prefill:
                server.behaviour = fails(400, "too long")
            for server in stage.decode:
                server.behaviour = hangs
            reply = await stage.ask()
            assert reply.status == 400
            assert reply.error["message"] == "too long"
            assert len(calls(stage.prefill)) == 1
            await until(lambda: [call.ended for call in calls(stage.decode)] == ["left"])
            await until(stage.idle)
            assert stage.metric("requests_total", endpoint="/v1/completions", ending="refused") == 1

    run(scene())


def test_decodes_refusal_ends_prefill_and_is_the_answer() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            stage.prefill[0].behaviour = hangs
            stage.decode[0].behaviour = fails(404, "no such model")
            reply = await stage.ask()
            assert reply.status == 404
            assert reply.error["message"] == "no such model"
            await until(lambda: stage.prefill[0].call.ended == "left")

    run(scene())


@pytest.mark.parametrize("failure", [fails(500), fails(429), fails(503), drops])
def test_when_prefill_fails_both_legs_are_sent_anew(failure: Behaviour) -> None:
    """The other leg of the attempt that failed is ended; the new attempt has an id and servers of its own."""

    async def scene() -> None:
        async with Scene(prefill=2, decode=2) as stage:
            for server in stage.decode:
                server.behaviour = once(hangs, decoded)
            # Decode answers on its second call, so both attempts have to meet the same decode server.
            stage.decode.pop().healthy = False
            await until(lambda: sum(server.up for server in stage.router.fleet.decode) == 1)
            for server in stage.prefill:
                server.behaviour = lambda server, request, call: (
                    failure if len(calls(stage.prefill)) == 1 else prefilled
                )(server, request, call)
            assert (await stage.ask()).status == 200
            first, second = stage.decode[0].calls
            await until(lambda: first.ended == "left")
            assert [first.params["attempt"], second.params["attempt"]] == [0, 1]
            assert first.params["transfer_id"] != second.params["transfer_id"]
            assert first.params["remote_engine_id"] != second.params["remote_engine_id"]
            assert [len(server.calls) for server in stage.prefill] == [1, 1]
            assert stage.metric("dispatches_total", kind="retry") == 1
            await until(stage.idle)

    run(scene())


@pytest.mark.parametrize("failure", [fails(500), fails_in_the_stream(500), drops, hangs_in_the_stream])
def test_when_decode_fails_before_its_first_token_it_is_tried_elsewhere(failure: Behaviour) -> None:
    async def scene() -> None:
        async with Scene(decode=2, silence=3.0) as stage:
            stage.prefill[0].behaviour = once(hangs, prefilled)
            for server in stage.decode:
                server.behaviour = lambda server, request, call: (
                    failure if len(calls(stage.decode)) == 1 else decoded
                )(server, request, call)
            reply = await stage.ask(**STREAM)
            assert reply.body == b"".join(events({}))
            assert [len(server.calls) for server in stage.decode] == [1, 1]
            await until(lambda: stage.prefill[0].calls[0].ended == "left")
            await until(stage.idle)

    run(scene())


def test_an_error_in_the_stream_that_is_the_requests_fault_is_final() -> None:
    async def scene() -> None:
        async with Scene(decode=2) as stage:
            for server in stage.decode:
                server.behaviour = fails_in_the_stream(400)
            reply = await stage.ask(**STREAM)
            assert reply.status == 400
            assert reply.error["message"] == "KV load failed"
            assert len(calls(stage.decode)) == 1

    run(scene())


def test_the_last_attempts_error_is_the_answer() -> None:
    async def scene() -> None:
        async with Scene(attempts=3) as stage:
            stage.prefill[0].behaviour = fails(503, "busy")
            stage.decode[0].behaviour = hangs
            reply = await stage.ask()
            assert reply.status == 503
            assert reply.error["message"] == "busy"
            assert [call.params["attempt"] for call in stage.prefill[0].calls] == [0, 1, 2]
            assert stage.metric("failed_legs_total", server=stage.prefill[0].url, role="prefill", status="503") == 3
            assert stage.metric("requests_total", endpoint="/v1/completions", ending="failed") == 1
            await until(stage.idle)

    run(scene())


def test_an_error_that_is_no_json_is_told_in_json() -> None:
    async def page(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
        return web.Response(status=502, text="<html>bad gateway</html>")

    async def scene() -> None:
        async with Scene() as stage:
            stage.prefill[0].behaviour = page
            stage.decode[0].behaviour = hangs
            reply = await stage.ask()
            assert reply.status == 502
            assert "502" in reply.error["message"]

    run(scene())


def test_redirects_and_empty_streams_are_failures() -> None:
    async def redirect(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
        raise web.HTTPFound("http://10.9.9.9/")

    async def empty(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
        return await begun(request)

    async def scene() -> None:
        async with Scene() as stage:
            stage.prefill[0].behaviour, stage.decode[0].behaviour = redirect, hangs
            assert (await stage.ask()).status == 502
            stage.prefill[0].behaviour = prefilled
            stage.decode[0].behaviour = empty
            reply = await stage.ask(**STREAM)
            assert reply.status == 502
            assert "without an event" in reply.error["message"]

    run(scene())


def test_prefill_that_fails_after_the_first_token_does_not_disturb_the_stream() -> None:
    async def late(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
        await server.release.wait()
        return await drops(server, request, call)

    async def scene() -> None:
        async with Scene() as stage:
            stage.prefill[0].behaviour = late
            stage.decode[0].behaviour = streams_on
            async with stage.session.post(f"{stage.url}/v1/completions", json=STREAM) as answer:
                first = await answer.content.readuntil(b"\n\n")
                stage.prefill[0].release.set()
                await until(lambda: stage.prefill[0].call.ended == "left")
                stage.decode[0].release.set()
                assert first + await answer.read() == b"".join(events({}))

    run(scene())


def test_prefill_that_still_runs_when_the_answer_is_done_is_ended() -> None:
    """Decode had the whole prompt: nobody waits for prefill any more."""

    async def scene() -> None:
        async with Scene() as stage:
            stage.prefill[0].behaviour = hangs
            assert (await stage.ask(**STREAM)).status == 200
            await until(lambda: stage.prefill[0].call.ended == "left")
            await until(stage.idle)

    run(scene())


def test_decode_that_breaks_off_is_told_in_the_stream() -> None:
    """A second attempt would begin the answer anew."""

    async def scene() -> None:
        async with Scene(decode=2) as stage:
            for server in stage.decode:
                server.behaviour = drops_in_the_stream
            reply = await stage.ask(**STREAM)
            assert reply.status == 200
            assert reply.body.startswith(events({})[0])
            told = reply.body.removeprefix(events({})[0])
            assert json.loads(told.removeprefix(b"data: "))["error"]["code"] == 502
            assert b"[DONE]" not in reply.body
            assert len(calls(stage.decode)) == 1
            await until(lambda: stage.metric("requests_total", endpoint="/v1/completions", ending="broken") == 1)
            await until(stage.idle)

    run(scene())


def test_an_answer_that_is_not_streamed_and_breaks_off_is_asked_for_again() -> None:
    async def half(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"id": ')
        return await drops(server, request, call)

    async def scene() -> None:
        async with Scene(decode=1) as stage:
            stage.decode[0].behaviour = once(half, decoded)
            reply = await stage.ask()
            assert reply.status == 200
            assert reply.json["choices"]

    run(scene())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_that_hangs_costs_its_silence_alone(role: str) -> None:
    async def scene() -> None:
        async with Scene(attempts=1, silence=0.3) as stage:
            servers = getattr(stage, role)
            servers[0].behaviour = hangs
            # Without a prompt's KV decode has no first token.
            if role == "prefill":
                stage.decode[0].behaviour = hangs_in_the_stream
            reply = await stage.ask(**STREAM)
            assert reply.status == 504
            assert "in time" in reply.error["message"]
            await until(lambda: [call.ended for call in calls(stage.prefill + stage.decode)].count("left") >= 1)
            await until(stage.idle)

    run(scene())


def test_a_slow_stream_is_not_a_silent_one() -> None:
    async def slow(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
        response = await begun(request)
        for event in events(call.body) * 4:
            await asyncio.sleep(0.4)
            await response.write(event)
        return response

    async def scene() -> None:
        async with Scene(silence=5.0, attempts=1) as stage:
            stage.decode[0].behaviour = slow
            assert (await stage.ask(**STREAM)).body == b"".join(events({}) * 4)

    run(scene())


def test_a_stream_that_falls_silent_is_ended() -> None:
    async def scene() -> None:
        async with Scene(silence=2.0) as stage:
            stage.decode[0].behaviour = streams_on
            reply = await stage.ask(**STREAM)
            assert b'"code":504' in reply.body
            await until(lambda: stage.decode[0].call.ended == "left")

    run(scene())


async def leave(stage: Scene, asked: asyncio.Task[object]) -> None:
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until(lambda: all(call.ended == "left" for call in calls(stage.prefill + stage.decode)))
    await until(stage.idle)
    await until(lambda: stage.metric("requests_total", endpoint="/v1/completions", ending="disconnected") == 1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_early_ends_both_legs(stream: bool) -> None:
    async def scene() -> None:
        async with Scene() as stage:
            stage.prefill[0].behaviour = hangs
            stage.decode[0].behaviour = hangs_in_the_stream if stream else hangs
            asked = asyncio.create_task(stage.ask(prompt="a", stream=stream))
            await until(lambda: len(calls(stage.prefill + stage.decode)) == 2)
            await leave(stage, asked)  # type: ignore[arg-type]

    run(scene())


def test_a_client_that_goes_away_in_mid_stream_ends_both_legs() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            stage.prefill[0].behaviour = hangs
            stage.decode[0].behaviour = streams_on
            seen = asyncio.Event()

            async def read() -> None:
                async with stage.session.post(f"{stage.url}/v1/completions", json=STREAM) as answer:
                    await answer.content.readuntil(b"\n\n")
                    seen.set()
                    await answer.read()

            asked = asyncio.create_task(read())
            await seen.wait()
            await leave(stage, asked)  # type: ignore[arg-type]

    run(scene())


def test_many_clients_that_go_away_at_any_moment_leave_nothing_behind() -> None:
    async def slow(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
        if server.name.startswith("p"):
            await asyncio.sleep(0.02)
            return await prefilled(server, request, call)
        response = await begun(request)
        for event in events(call.body):
            await asyncio.sleep(0.01)
            await response.write(event)
        return response

    async def scene() -> None:
        async with Scene(prefill=2, decode=2, max_running=8) as stage:
            for server in stage.prefill + stage.decode:
                server.behaviour = slow
            asked = [
                asyncio.create_task(stage.ask(prompt=[1] * number, stream=number % 3 > 0)) for number in range(1, 101)
            ]
            for number, task in enumerate(asked):
                await asyncio.sleep(0.002)
                if number % 2:
                    asked[number // 2].cancel()
                elif number % 7 == 0:
                    task.cancel()
            results = await asyncio.gather(*asked, return_exceptions=True)
            kept = [one for one in results if not isinstance(one, BaseException)]
            assert kept
            assert all(reply.status == 200 for reply in kept)
            await until(stage.idle)
            await until(lambda: all(call.ended for call in calls(stage.prefill + stage.decode)))
            assert (await stage.ask()).status == 200

    run(scene())


def test_a_client_that_reads_nothing_is_left() -> None:
    async def floods(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
        response = await begun(request)
        while True:
            await response.write(b"data: " + b"x" * 2**16 + b"\n\n")

    async def scene() -> None:
        async with Scene(client_stall=0.3) as stage:
            stage.decode[0].behaviour = floods
            port = int(stage.url.rpartition(":")[2])
            plug = socket.create_connection(("127.0.0.1", port))
            body = json.dumps(STREAM).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            plug.sendall(head + body)
            await until(lambda: bool(stage.decode[0].calls))
            await until(lambda: stage.decode[0].call.ended == "left")
            await until(stage.idle)
            # Its connection was ended as well: after what lay in buffers there is nothing more.
            plug.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                while await asyncio.to_thread(plug.recv, 2**20):
                    pass
            plug.close()

    run(scene())


def test_what_does_not_run_waits_and_what_does_not_wait_is_turned_away() -> None:
    async def scene() -> None:
        async with Scene(max_running=1, max_queue=1) as stage:
            stage.decode[0].behaviour = waits
            first = asyncio.create_task(stage.ask(prompt="first"))
            await until(lambda: stage.router.gate.running == 1)
            second = asyncio.create_task(stage.ask(prompt="second"))
            await until(lambda: stage.router.gate.waiting == 1)
            third = await stage.ask(prompt="third")
            assert third.status == 429
            assert third.error["type"] == "rate_limit_error"
            assert third.headers["Retry-After"] == "1"
            assert stage.metric("requests_total", endpoint="/v1/completions", ending="overloaded") == 1
            assert [call.body["prompt"] for call in stage.decode[0].calls] == ["first"]
            stage.decode[0].release.set()
            assert [(await first).status, (await second).status] == [200, 200]
            assert [call.body["prompt"] for call in stage.decode[0].calls] == ["first", "second"]

    run(scene())


def test_a_client_that_leaves_the_queue_makes_room() -> None:
    async def scene() -> None:
        async with Scene(max_running=1, max_queue=1) as stage:
            stage.decode[0].behaviour = waits
            first = asyncio.create_task(stage.ask())
            await until(lambda: stage.router.gate.running == 1)
            second = asyncio.create_task(stage.ask())
            await until(lambda: stage.router.gate.waiting == 1)
            second.cancel()
            await until(lambda: stage.router.gate.waiting == 0)
            third = asyncio.create_task(stage.ask())
            await until(lambda: stage.router.gate.waiting == 1)
            stage.decode[0].release.set()
            assert [(await first).status, (await third).status] == [200, 200]
            assert len(stage.decode[0].calls) == 2

    run(scene())


def test_the_queue_has_an_end() -> None:
    async def scene() -> None:
        async with Scene(max_running=1, queue_limit=0.1) as stage:
            stage.decode[0].behaviour = waits
            first = asyncio.create_task(stage.ask())
            await until(lambda: stage.router.gate.running == 1)
            second = await stage.ask()
            assert second.status == 503
            assert "0.1 s" in second.error["message"]
            stage.decode[0].release.set()
            assert (await first).status == 200

    run(scene())


def test_an_unhealthy_server_gets_nothing_until_it_is_well() -> None:
    async def scene() -> None:
        async with Scene(prefill=2) as stage:
            sick, well = stage.prefill
            sick.healthy = False
            await until(lambda: not stage.state(sick).up)
            for _ in range(3):
                assert (await stage.ask()).status == 200
            assert [len(sick.calls), len(well.calls)] == [0, 3]
            sick.healthy = True
            await until(lambda: stage.state(sick).up)
            for _ in range(3):
                assert (await stage.ask()).status == 200
            assert sick.calls

    run(scene())


def test_a_server_that_is_killed_and_restarted_is_used_again() -> None:
    """Requests in flight fail over to nothing and say so; later ones wait for the server and succeed."""

    async def scene() -> None:
        async with Scene(patience=20.0, health_interval=0.1) as stage:
            (prefill,) = stage.prefill
            prefill.behaviour = hangs
            stage.decode[0].behaviour = once(hangs, decoded)
            asked = asyncio.create_task(stage.ask())
            await until(lambda: len(prefill.calls) == 1 and len(stage.decode[0].calls) == 1)
            await prefill.stop()
            await until(lambda: not stage.state(prefill).up)
            async with stage.session.get(f"{stage.url}/health") as answer:
                assert answer.status == 503
                assert not (await answer.json())["ready"]
            assert not asked.done()
            prefill.behaviour = prefilled
            await prefill.start()
            # It was in flight when the server died, and went to the one that took its place.
            assert (await asked).status == 200
            assert stage.decode[0].calls[0].ended == "left"
            async with stage.session.get(f"{stage.url}/health") as answer:
                assert answer.status == 200

    run(scene())


def test_without_a_prefill_server_requests_fail_or_are_decodes_alone() -> None:
    async def scene(alone: bool) -> None:
        async with Scene(decode_alone=alone, patience=0.1) as stage:
            await stage.prefill[0].stop()
            reply = await stage.ask()
            if alone:
                assert reply.status == 200
                assert "kv_transfer_params" not in stage.decode[0].calls[-1].body
                assert stage.metric("alone_total", reason="no prefill server") == 1
            else:
                assert reply.status == 503
                assert stage.prefill[0].url in reply.error["message"]

    run(scene(True))
    run(scene(False))


def test_servers_that_come_later_are_found() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            late = stage.decode[0]
            stage.router.fleet.patience = 0.1
            await late.stop()
            await until(lambda: not stage.state(late).up)
            assert (await stage.ask()).status == 503
            async with stage.session.get(f"{stage.url}/v1/models") as answer:
                assert answer.status == 503
            await late.start()
            await until(lambda: stage.state(late).up)
            stage.router.fleet.patience = 20.0
            assert (await stage.ask()).status == 200

    run(scene())


def test_at_the_end_what_runs_is_finished() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            stage.decode[0].behaviour = streams_on
            async with stage.session.post(f"{stage.url}/v1/completions", json=STREAM) as answer:
                first = await answer.content.readuntil(b"\n\n")
                closing = asyncio.create_task(stage.runner.cleanup())
                await asyncio.sleep(0.05)
                with pytest.raises(aiohttp.ClientConnectorError):
                    await stage.session.get(f"{stage.url}/health")
                stage.decode[0].release.set()
                assert first + await answer.read() == b"".join(events({}))
            await closing

    run(scene())
