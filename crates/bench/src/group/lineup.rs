//! The candidates of the message benches by name: what each series is, and which kind of member it has.

use super::worker::WorkerKind;
use crate::harness::Role;
use crate::results::series::{MEMFERRY, SHAREABLE};

/// UCX, measured by its own program `ucx_perftest`. A bench may omit it if time is short.
pub(crate) const UCX: &str = "UCX";

/// One copy, by the receiver alone.
pub(crate) const CROSS_MEMORY: &str = "cross-memory read";
/// Two copies through shared memory.
pub(crate) const TWO_COPIES: &str = "shared memory, two copies";
/// TCP over the loopback interface.
pub(crate) const LOOPBACK: &str = "loopback TCP";

/// A receiver that posts no receive ahead.
pub(crate) const RECEIVE_NAIVE: &str = "naive";
/// Receivers that post receives before they need the messages.
pub(crate) const RECEIVE_AHEAD: [&str; 3] =
    ["memferry (two phases)", "memferry (three phases)", "memferry (background)"];

/// Receivers of packets: by memcpy, and by a delivery of the ferry.
pub(crate) const PACKETS: [&str; 2] = ["packets, memcpy", "packets, deliver"];

/// Messages into memory that may not be resident: without prefaulting, and by default; first with
/// ordinary memory, then with shareable memory.
pub(crate) const FIRST_TOUCH: [[&str; 2]; 2] =
    [["plain", MEMFERRY], ["plain (shareable)", SHAREABLE]];

/// Memferry's endpoints, by series.
pub(super) const MEMFERRY_KINDS: [(&str, WorkerKind); 2] =
    [(MEMFERRY, WorkerKind::Memferry), (SHAREABLE, WorkerKind::Shareable)];

/// Transports from one process to another: Memferry's link, and the methods that every program has.
pub(super) const TRANSPORTS: [(&str, Role, WorkerKind); 6] = [
    (MEMFERRY, Role::Memferry, WorkerKind::Link),
    (CROSS_MEMORY, Role::Peer, WorkerKind::CrossMemory),
    (TWO_COPIES, Role::Peer, WorkerKind::TwoCopies),
    (LOOPBACK, Role::Peer, WorkerKind::LoopbackTcp),
    ("Unix socket", Role::Peer, WorkerKind::UnixSocket),
    ("pipe", Role::Peer, WorkerKind::Pipe),
];

/// Memferry's receivers, which differ in their receive loops.
pub(super) const RECEIVERS: [(&str, Role, WorkerKind); 4] = [
    (RECEIVE_NAIVE, Role::Peer, WorkerKind::ReceiveNaive),
    (RECEIVE_AHEAD[0], Role::Memferry, WorkerKind::ReceiveTwoPhase),
    (RECEIVE_AHEAD[1], Role::Memferry, WorkerKind::ReceiveThreePhase),
    (RECEIVE_AHEAD[2], Role::Memferry, WorkerKind::ReceiveBackground),
];

/// Members of the first-touch task: of one kind for both series of a pair.
pub(super) const FIRST_TOUCH_KINDS: [([&str; 2], WorkerKind); 2] =
    [(FIRST_TOUCH[0], WorkerKind::Memferry), (FIRST_TOUCH[1], WorkerKind::Shareable)];
