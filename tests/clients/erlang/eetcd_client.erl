%% An application on Erlang's eetcd: a watch, and a lease that eetcd keeps, until SIGTERM. See README.md for its lines.
%%
%% It must not know what happens meanwhile. What eetcd does not do by itself is not done here.
-module(eetcd_client).
-export([main/0]).

-define(CLIENT, application_client).
%% The library's own limit for a connection is 1 s, too short for a busy machine.
-define(PATIENCE, 30000).

main() ->
    [Endpoint, Prefix, Ttl | Login] = init:get_plain_arguments(),
    {ok, _} = application:ensure_all_started(eetcd),
    {ok, Version} = application:get_key(eetcd, vsn),
    {ok, Below} = application:get_key(gun, vsn),
    emit("start", [{"client", "eetcd " ++ Version ++ " on gun " ++ Below}]),
    case eetcd:open(?CLIENT, [Endpoint], [{connect_timeout, ?PATIENCE} | credentials(Login)], tcp, []) of
        {ok, _} -> run(list_to_binary(Prefix), list_to_integer(Ttl));
        {error, Reason} -> fatal(Reason)
    end.

credentials([]) -> [];
credentials([User, PasswordFile]) ->
    {ok, Password} = file:read_file(PasswordFile),
    [{name, User}, {password, string:trim(binary_to_list(Password))}].

run(Prefix, Ttl) ->
    Watched = eetcd_watch:with_prefix(eetcd_watch:with_key(eetcd_watch:new(), <<Prefix/binary, "watched/">>)),
    {ok, Watch, _} = eetcd_watch:watch(?CLIENT, Watched, ?PATIENCE),
    {ok, #{'ID' := Lease}} = eetcd_lease:grant(patient(eetcd_lease:new(?CLIENT)), Ttl),
    {ok, Keeper} = eetcd_lease:keep_alive(?CLIENT, Lease),
    monitor(process, Keeper),
    Leased = eetcd_kv:with_key(patient(eetcd_kv:new(?CLIENT)), <<Prefix/binary, "leased">>),
    {ok, _} = eetcd_kv:put(eetcd_kv:with_lease(eetcd_kv:with_value(Leased, <<"v">>), Lease)),
    emit("ready", []),
    loop(Watch, Keeper).

patient(Context) -> eetcd:with_timeout(Context, ?PATIENCE).

loop(Watch, Keeper) ->
    receive
        #{event := 'KeepAliveHalted', reason := Reason} ->
            emit("halted", [{"why", Reason}]),
            loop(Watch, Keeper);
        {'DOWN', _, process, Keeper, Reason} ->
            emit("halted", [{"why", Reason}]),
            loop(Watch, Keeper);
        Message -> loop(watched(Watch, Message), Keeper)
    end.

watched(none, _) -> none;
watched(Watch, Message) ->
    case eetcd_watch:watch_stream(Watch, Message) of
        {ok, Next, #{events := Events}} ->
            [emit("event", [{"key", Key}, {"value", Value}]) || #{kv := #{key := Key, value := Value}} <- Events],
            Next;
        {more, Next} -> Next;
        unknown -> Watch;
        {error, Reason} ->
            emit("ended", [{"why", Reason}]),
            none
    end.

fatal(Reason) ->
    emit("fatal", [{"why", Reason}]),
    halt(1).

emit(Kind, Fields) ->
    Texts = [[",\"", Name, "\":\"", quoted(Value), "\""] || {Name, Value} <- Fields],
    io:put_chars(["{\"kind\":\"", Kind, "\"", Texts, "}\n"]).

quoted(Value) ->
    Text = case io_lib:printable_list(Value) of
        true -> Value;
        false when is_binary(Value) -> Value;
        false -> io_lib:format("~0p", [Value])
    end,
    re:replace(Text, "[\\\\\"]", "\\\\&", [global]).
