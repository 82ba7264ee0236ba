"""What a router makes of requests while all is well."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")

from router_scene import Call, FakeServer, Scene, decoded, events, run, until, waits

from pushkv_vllm.router.config import Mode, Shape


def test_both_legs_go_at_once() -> None:
    """Each server answers only after the other has been asked."""

    async def scene() -> None:
        async with Scene() as stage:
            (prefill,), (decode,) = stage.prefill, stage.decode
            prefill.behaviour = decode.behaviour = waits
            asked = asyncio.create_task(stage.ask(prompt=[1, 2, 3], stream=True))
            await until(lambda: len(prefill.calls) == 1 and len(decode.calls) == 1)
            prefill.release.set()
            await until(lambda: prefill.call.ended == "answered")
            assert not asked.done()
            decode.release.set()
            assert (await asked).status == 200
            await until(stage.idle)

    run(scene())


def test_the_legs_share_a_transfer_id_that_is_fresh_for_each_request() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            for _ in range(3):
                await stage.ask(headers={"X-Request-Id": "same"}, prompt=[1, 2, 3], n=3)
            seen = set()
            for first, second in zip(stage.prefill[0].calls, stage.decode[0].calls, strict=True):
                identity = first.params["transfer_id"]
                assert first.params == {"transfer_id": identity, "attempt": 0, "n": 3, "do_remote_decode": True,
                                        "do_remote_prefill": False}  # fmt: skip
                assert second.params == {"transfer_id": identity, "attempt": 0, "n": 3, "do_remote_decode": False,
                                         "do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 7100,
                                         "remote_engine_id": "p0", "remote_dp_rank": 0, "tp_size": 2}  # fmt: skip
                assert first.headers["X-Request-Id"] == second.headers["X-Request-Id"] == identity
                seen.add(identity)
            assert len(seen) == 3
            assert "same" not in seen

    run(scene())


def test_prefill_is_sent_the_prompt_and_asked_for_one_token() -> None:
    answer = {"max_tokens": 50, "min_tokens": 3, "n": 2, "logprobs": 5, "best_of": 3, "stream": True,
              "stream_options": {"include_usage": True}, "return_token_ids": True}  # fmt: skip
    prompt = {
        "model": "m",
        "prompt": "a b",
        "temperature": 0.5,
        "seed": 7,
        "cache_salt": "s",
        "add_special_tokens": False,
    }

    async def scene() -> None:
        async with Scene() as stage:
            await stage.ask(**prompt, **answer)
            sent = stage.prefill[0].call.body
            del sent["kv_transfer_params"]
            assert sent == {**prompt, "max_tokens": 1, "stream": False}
            sent = stage.decode[0].call.body
            del sent["kv_transfer_params"]
            assert sent == {**prompt, **answer}

    run(scene())


def test_chat_goes_its_own_way() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
            tools = [{"type": "function", "function": {"name": "f"}}]
            await stage.ask(
                "/v1/chat/completions", messages=messages, tools=tools, max_completion_tokens=9, top_logprobs=2
            )
            sent = stage.prefill[0].call
            assert sent.path == stage.decode[0].call.path == "/v1/chat/completions"
            del sent.body["kv_transfer_params"]
            assert sent.body == {"messages": messages, "tools": tools, "max_completion_tokens": 1, "stream": False}

    run(scene())


def test_answers_pass_through_as_they_are() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
            reply = await stage.ask(**body)
            assert reply.body == b"".join(events(body))
            assert b"usage" in reply.body
            assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            reply = await stage.ask(prompt="a")
            assert reply.body == b'{"id": "d",  "choices":[{"text":"all of it"}]}'
            assert reply.headers["Content-Type"].startswith("application/json")

    run(scene())


def test_tokens_are_passed_on_as_they_come() -> None:
    """Each token is sent only when the client has the one before."""

    async def in_steps(server: FakeServer, request: object, call: Call) -> object:
        from router_scene import begun

        response = await begun(request)  # type: ignore[arg-type]
        for event in events(call.body):
            await response.write(event)
            await server.release.wait()
            server.release.clear()
        return response

    async def scene() -> None:
        async with Scene() as stage:
            stage.decode[0].behaviour = in_steps  # type: ignore[assignment]
            async with stage.session.post(
                f"{stage.url}/v1/completions", json={"prompt": "a", "stream": True}
            ) as answer:
                for event in events({}):
                    assert await answer.content.readuntil(b"\n\n") == event
                    stage.decode[0].release.set()

    run(scene())


def test_a_clients_id_comes_back_and_goes_no_further() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            assert (await stage.ask(headers={"X-Request-Id": "mine-1"})).headers["X-Request-Id"] == "mine-1"
            bad = (await stage.ask(headers={"X-Request-Id": "a b" * 100})).headers["X-Request-Id"]
            assert len(bad) == 32
            assert (await stage.ask(prompt=1, headers={"X-Request-Id": "mine-2"})).headers["X-Request-Id"] == "mine-2"

    run(scene())


def test_headers_that_go_on_are_named() -> None:
    async def scene() -> None:
        async with Scene(forward=("X-Tenant",)) as stage:
            given = {"Authorization": "Bearer key", "traceparent": "00-1", "X-Tenant": "t", "X-Other": "o",
                     "X-data-parallel-rank": "3"}  # fmt: skip
            await stage.ask(headers=given)
            for call in (stage.prefill[0].call, stage.decode[0].call):
                kept = {name: value for name, value in given.items() if call.headers.get(name) == value}
                assert set(kept) == {"Authorization", "traceparent", "X-Tenant"}
                assert "X-data-parallel-rank" not in call.headers
            async with stage.session.get(f"{stage.url}/v1/models", headers=given) as answer:
                assert await answer.json() == {"data": [{"id": "d0"}], "authorization": "Bearer key"}

    run(scene())


def test_the_prefill_rank_is_pinned_and_named_to_decode() -> None:
    async def scene() -> None:
        async with Scene(dp=2) as stage:
            prefill, decode = stage.prefill[0], stage.decode[0]
            prefill.behaviour = waits
            asked = [asyncio.create_task(stage.ask()) for _ in range(4)]
            await until(lambda: len(prefill.calls) == 4 and len(decode.calls) == 4)
            named = {call.params["transfer_id"]: str(call.params["remote_dp_rank"]) for call in decode.calls}
            pinned = {call.params["transfer_id"]: call.headers["X-data-parallel-rank"] for call in prefill.calls}
            assert named == pinned
            assert sorted(pinned.values()) == ["0", "0", "1", "1"]
            assert all("X-data-parallel-rank" not in call.headers for call in decode.calls)
            prefill.release.set()
            await asyncio.gather(*asked)

    run(scene())


def test_a_request_goes_where_the_fewest_tokens_are_outstanding() -> None:
    async def scene() -> None:
        async with Scene(prefill=2, decode=2) as stage:
            for server in (*stage.prefill, *stage.decode):
                server.behaviour = waits
            asked = [asyncio.create_task(stage.ask(prompt=[1] * 1000, max_tokens=10))]
            await until(lambda: sum(len(server.calls) for server in stage.decode) == 1)
            # The other pair takes all of these: together they are less work than the first.
            asked += [asyncio.create_task(stage.ask(prompt=[1] * 20, max_tokens=10)) for _ in range(9)]
            await until(lambda: sum(len(server.calls) for server in stage.decode) == 10)
            assert sorted(len(server.calls) for server in stage.decode) == [1, 9]
            assert sorted(len(server.calls) for server in stage.prefill) == [1, 9]
            loads = {server.tokens for server in stage.router.fleet.decode}
            assert loads == {1010, 9 * 30}
            for server in (*stage.prefill, *stage.decode):
                server.release.set()
            await asyncio.gather(*asked)
            await until(stage.idle)

    run(scene())


def test_prefills_share_of_the_work_ends_before_decodes() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            stage.decode[0].behaviour = waits
            asked = asyncio.create_task(stage.ask(prompt=[1] * 50, max_tokens=5))
            await until(lambda: stage.prefill[0].calls and stage.prefill[0].call.ended == "answered")
            prefill, decode = stage.state(stage.prefill[0]), stage.state(stage.decode[0])
            await until(lambda: prefill.tokens == 0)
            assert (prefill.requests, decode.requests, decode.tokens) == (0, 1, 55)
            stage.decode[0].release.set()
            await asked

    run(scene())


def test_equal_servers_take_turns() -> None:
    async def scene() -> None:
        async with Scene(prefill=3, decode=2) as stage:
            for _ in range(6):
                await stage.ask()
            assert [len(server.calls) for server in stage.prefill] == [2, 2, 2]
            assert [len(server.calls) for server in stage.decode] == [3, 3]

    run(scene())


@pytest.mark.parametrize(("path", "body", "made"), [
    ("/v1/completions", {"prompt": "a"}, "cmpl-{}-0"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "chatcmpl-{}"),
])  # fmt: skip
def test_the_stock_connectors_parameters(path: str, body: dict[str, object], made: str) -> None:
    async def scene() -> None:
        async with Scene(shape=Shape.STOCK) as stage:
            await stage.ask(path, **body)
            first, second = stage.prefill[0].call, stage.decode[0].call
            identity = first.headers["X-Request-Id"]
            assert second.headers["X-Request-Id"] == identity
            assert first.params["do_remote_decode"] is True
            assert "transfer_id" not in first.params
            assert second.params == {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p0",
                                     "remote_host": "10.0.0.1", "remote_port": 7100, "tp_size": 2,
                                     "remote_block_ids": [], "remote_request_id": made.format(identity)}  # fmt: skip

    run(scene())


def test_the_stock_connectors_data_parallel_ranks() -> None:
    async def scene() -> None:
        async with Scene(shape=Shape.STOCK, dp=2) as stage:
            stage.prefill[0].behaviour = waits
            asked = [asyncio.create_task(stage.ask()) for _ in range(2)]
            await until(lambda: len(stage.decode[0].calls) == 2)
            told = {(call.params["remote_port"], call.params["remote_engine_id"]) for call in stage.decode[0].calls}
            assert told == {(7100, "p0_dp0"), (7101, "p0_dp1")}
            stage.prefill[0].release.set()
            await asyncio.gather(*asked)

    run(scene())


@pytest.mark.parametrize("shape", Shape)
def test_in_sequence_decode_gets_what_prefill_answered(shape: Shape) -> None:
    async def scene() -> None:
        async with Scene(mode=Mode.SEQUENTIAL, shape=shape) as stage:
            stage.prefill[0].behaviour = waits
            asked = asyncio.create_task(stage.ask(prompt="a", n=2))
            await until(lambda: len(stage.prefill[0].calls) == 1)
            await asyncio.sleep(0.05)
            assert not stage.decode[0].calls
            stage.prefill[0].release.set()
            assert (await asked).status == 200
            more = {"n": 2} if shape is Shape.PUSHKV else {}
            assert stage.decode[0].call.params == {"do_remote_prefill": True, "do_remote_decode": False,
                                                   "remote_engine_id": "p0", "token": "from P", **more}  # fmt: skip
            await until(stage.idle)

    run(scene())


def test_in_sequence_without_parameters_decode_computes_the_prompt() -> None:
    async def scene() -> None:
        async with Scene(mode=Mode.SEQUENTIAL) as stage:
            stage.prefill[0].behaviour = decoded
            assert (await stage.ask()).status == 200
            assert "kv_transfer_params" not in stage.decode[0].call.body
            assert stage.metric("alone_total", reason="no parameters") == 1

    run(scene())


@pytest.mark.parametrize(("body", "reason"), [
    ({"prompt": ["a", "b"]}, "several prompts"),
    ({"prompt": [[1, 2], [3]]}, "several prompts"),
    ({"prompt": "a", "prompt_logprobs": 0}, "prompt logprobs"),
    ({"prompt": "a", "echo": True, "logprobs": 1}, "echo with logprobs"),
    ({"prompt": "a", "use_beam_search": True}, "beam search"),
    ({"prompt_embeds": "AAAA"}, "prompt embeddings"),
])  # fmt: skip
def test_what_cannot_be_pushed_is_decodes_alone(body: dict[str, object], reason: str) -> None:
    async def scene() -> None:
        async with Scene() as stage:
            assert (await stage.ask(**body)).status == 200
            assert not stage.prefill[0].calls
            assert stage.decode[0].call.body == body
            assert stage.metric("alone_total", reason=reason) == 1

    run(scene())


def test_one_prompt_in_a_list_is_pushed() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            await stage.ask(prompt=[[1, 2, 3]])
            assert stage.prefill[0].call.body["prompt"] == [[1, 2, 3]]

    run(scene())


@pytest.mark.parametrize(("raw", "word"), [
    (b"", "no JSON"),
    (b"{", "no JSON"),
    (b"\xff\xfe", "no JSON"),
    (b"[" * 100_000, "no JSON"),
    (b"[1]", "list"),
    (b'"prompt"', "str"),
    (b"{}", "prompt is None"),
    (b'{"prompt": 3}', "prompt is 3"),
    (b'{"prompt": []}', "prompt is []"),
    (b'{"prompt": "a", "n": 0}', "n is 0"),
    (b'{"prompt": "a", "n": 100000}', "n is 100000"),
    (b'{"prompt": "a", "n": true}', "n is True"),
    (b'{"prompt": "a", "stream": "yes"}', "stream is 'yes'"),
    (b'{"prompt": "a", "max_tokens": -1}', "max_tokens is -1"),
    (b'{"prompt": "a", "max_tokens": NaN}', "no JSON"),
    (b'{"prompt": "a", "kv_transfer_params": {"remote_host": "10.9.9.9"}}', "kv_transfer_params"),
])  # fmt: skip
def test_malformed_requests_are_refused_and_reach_nobody(raw: bytes, word: str) -> None:
    async def scene() -> None:
        async with Scene() as stage:
            async with stage.session.post(f"{stage.url}/v1/completions", data=raw) as answer:
                assert answer.status == 400
                error = json.loads(await answer.read())["error"]
            assert error["type"] == "invalid_request_error"
            assert word in error["message"]
            assert not stage.prefill[0].calls
            assert not stage.decode[0].calls
            assert stage.metric("requests_total", endpoint="/v1/completions", ending="refused") == 1
            assert (await stage.ask()).status == 200

    run(scene())


def test_messages_are_asked_for() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            reply = await stage.ask("/v1/chat/completions", messages=[])
            assert reply.status == 400
            assert "messages is []" in reply.error["message"]

    run(scene())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(chunked: bool) -> None:
    async def pieces() -> object:
        for _ in range(100):
            yield b" " * 10_000

    async def scene() -> None:
        async with Scene(max_body=100_000) as stage:
            data = pieces() if chunked else b" " * 1_000_000
            async with stage.session.post(f"{stage.url}/v1/completions", data=data) as answer:
                assert answer.status == 413
                assert "100000" in json.loads(await answer.read())["error"]["message"]
            assert (await stage.ask(prompt="a" * 90_000)).status == 200

    run(scene())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def scene() -> None:
        async with Scene(body_limit=2.0) as stage:
            port = int(stage.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert b"408" in await reader.readline()
            writer.close()
            assert (await stage.ask()).status == 200

    run(scene())


def test_other_paths_and_methods_are_told_in_json() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            reply = await stage.ask("/v1/embeddings")
            assert reply.status == 404
            assert "/v1/embeddings" in reply.error["message"]
            async with stage.session.get(f"{stage.url}/v1/completions") as answer:
                assert answer.status == 405
                assert answer.headers["Allow"] == "POST"
                assert (await answer.json())["error"]["code"] == 405

    run(scene())


def test_the_metrics_page() -> None:
    async def scene() -> None:
        async with Scene() as stage:
            await stage.ask(stream=True, prompt="a")
            async with stage.session.get(f"{stage.url}/metrics") as answer:
                page = await answer.text()
            for line in (
                'pushkv_router_requests_total{ending="answered",endpoint="/v1/completions"} 1.0',
                'pushkv_router_dispatches_total{kind="first"} 1.0',
                "pushkv_router_time_to_first_token_seconds_count 1.0",
                "pushkv_router_prefill_leg_seconds_count 1.0",
                "pushkv_router_running 0.0",
                f'pushkv_router_server_up{{role="prefill",server="{stage.prefill[0].url}"}} 1.0',
                f'pushkv_router_server_outstanding_tokens{{role="decode",server="{stage.decode[0].url}"}} 0.0',
            ):
                assert line in page.splitlines(), page

    run(scene())
