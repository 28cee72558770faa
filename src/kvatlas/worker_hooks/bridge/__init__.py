"""Runs beside an unmodified engine: its ZMQ events become the events of an instance.

    engine --PUB--> ZmqSource --stimuli--> FollowState --effects--> ring --> Sidecar --> bus
           <-DEALER-- replay  <------------ AskReplay

`follow_state` decides, `delivery` and `waiting` keep what went on and what has to wait,
`zmq_source` and `engine_probe` read, `run` puts a rank together.

What nobody outside an engine can know: that an idle engine was reset, before its next batch says
so; whether a repeated store is a further copy or only repeated news, before there are more than the
engine has; which blocks hits have kept alive since something was missed (`turnover`). A hook within
the engine knows all of it. Adapters are routed by name alone, for what is in one does not show.
"""
