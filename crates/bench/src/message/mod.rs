//! Benches of messages between processes, and the tasks that their groups execute.

pub(crate) mod alltoall;
pub(crate) mod collective_task;
pub(crate) mod collectives;
pub(crate) mod first_touch;
pub(crate) mod ipc;
pub(crate) mod matching;
pub(crate) mod messages;
pub(crate) mod pingpong;
pub(crate) mod receive_overhead;
pub(crate) mod receiver;
pub(crate) mod scale;
pub(crate) mod stream;
