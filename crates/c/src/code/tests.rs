//! Every error of the core has its code, and every code its text.

use std::collections::HashSet;

use memferry::engine::OpenError;
use memferry::engine::cpu::ProfileError;
use memferry::memory::pinning::{PageRange, PinError};
use memferry::message::{self, ConnectError, DisconnectReason};
use memferry::{BuildError, CookieError, Error, ExecutionError, ValidationError};
use memferry_sys::cuda::DriverError;

use super::*;

/// One error of every kind, with the code that is documented for it.
fn one_of_each() -> Vec<(c_int, CallError)> {
    let copy = |code, error: Error| (code, CallError::from(error));
    let build = |code, error: BuildError| (code, CallError::from(error));
    let (side, engine, done_bytes) = ("source", String::from("cpu"), 0);
    let (name, value, expected) = ("MEMFERRY_CHANNELS", String::from("many"), "a number");
    let environment = BuildError::Environment { name, value: value.clone(), expected };
    let wraps = ValidationError::Wraps { side, address: u64::MAX, length: 2 };
    let range = ValidationError::OutOfRange { from: 1, to: 3, length: 2 };
    let lengths = ValidationError::LengthMismatch { source_bytes: 1, target_bytes: 2 };
    let no_engine = ValidationError::NoEngine {
        operation: memferry::engine::Opcode::Copy,
        source_memory: memferry::MemoryKind::Host,
        target_memory: memferry::MemoryKind::Device,
        engines: "cpu".into(),
    };
    let bad_memory = ExecutionError::BadMemory { address: 1, done_bytes };
    let system = OpenError::System { engine: engine.clone(), reason: "no threads".into() };
    let no_gpu = OpenError::System { engine: "cuda".into(), reason: "no driver".into() };
    let refused = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
    let unreadable = ProfileError::Io { path: "/profile".into(), error: refused };
    let malformed = ProfileError::Malformed { path: "/profile".into(), problem: "no".into() };
    vec![
        copy(ADMA_EFAULT, ValidationError::Null { side }.into()),
        copy(ADMA_EOVERFLOW, wraps.into()),
        copy(ADMA_ERANGE, range.into()),
        copy(ADMA_EINVAL, lengths.into()),
        copy(ADMA_EOPNOTSUPP, no_engine.into()),
        copy(ADMA_EOPNOTSUPP, ValidationError::BatchMemory { side, item: 1 }.into()),
        copy(ADMA_EBADF, CookieError::Foreign(-14).into()),
        copy(ADMA_ESTALE, CookieError::Foreign(14).into()),
        copy(ADMA_ENOENT, CookieError::Unknown(14).into()),
        copy(ADMA_EIDRM, CookieError::Expired(14).into()),
        copy(ADMA_ENOSPC, CookieError::Exhausted.into()),
        copy(ADMA_EIO, ExecutionError::Engine { done_bytes, reason: "hot" }.into()),
        copy(ADMA_ENXIO, bad_memory.into()),
        copy(ADMA_ECANCELED, ExecutionError::Cancelled { done_bytes }.into()),
        copy(ADMA_ENOLINK, ExecutionError::Predecessor.into()),
        copy(ADMA_ECHILD, ExecutionError::Forked.into()),
        build(ADMA_EDOM, environment),
        build(ADMA_EBUSY, OpenError::Exhausted { engine }.into()),
        build(ADMA_EAGAIN, system.into()),
        build(ADMA_ENODEV, no_gpu.into()),
        build(ADMA_EACCES, unreadable.into()),
        build(ADMA_EBADMSG, malformed.into()),
        build(ADMA_EUSERS, BuildError::TooMany(65535)),
        build(ADMA_EDOM, BuildError::Setting { name, value, expected }),
    ]
}

/// The same for links.
fn one_of_each_of_links() -> Vec<(c_int, CallError)> {
    use message::{
        CrossMemoryDenied, Error as E, MemorySide, Rights, SystemError, ValidationError as V,
    };
    let link = |code, error: E| (code, CallError::from(error));
    let system = |errno| {
        let error = SystemError(std::io::Error::from_raw_os_error(errno).into());
        E::Connect(ConnectError::System { what: "listening", error })
    };
    let name = || String::from("name");
    let (value, expected) = (String::from("maybe"), "on or off");
    let setting = V::Setting { name: "MEMFERRY_BACKGROUND", value, expected };
    let outside = V::OutsideWindow { offset: 1, bytes: 8, window_bytes: 8 };
    let version = ConnectError::Version { name: name(), theirs: 2, ours: 1 };
    vec![
        link(ADMA_EFAULT, V::NullPointer(1).into()),
        link(ADMA_EOVERFLOW, V::TooLong.into()),
        link(ADMA_ENOBUFS, V::TooManyOperations(1).into()),
        link(ADMA_EDOM, setting.into()),
        link(ADMA_EINVAL, V::UnknownPeer.into()),
        link(ADMA_EADDRINUSE, ConnectError::NameInUse(name()).into()),
        link(ADMA_ECONNREFUSED, ConnectError::NoListener(name()).into()),
        link(ADMA_ECONNREFUSED, ConnectError::Rejected(name(), "no").into()),
        link(ADMA_ETIMEDOUT, ConnectError::NoReply { name: name(), seconds: 1 }.into()),
        link(ADMA_EPERM, ConnectError::UserNotAllowed(1).into()),
        link(ADMA_EPROTO, version.into()),
        link(ADMA_EMFILE, ConnectError::TooManyPeers(1).into()),
        link(ADMA_EMFILE, system(libc::EMFILE)),
        link(ADMA_EACCES, system(libc::EACCES)),
        link(ADMA_EADDRNOTAVAIL, system(libc::ENAMETOOLONG)),
        link(ADMA_EAGAIN, system(libc::ENOMEM)),
        link(ADMA_EMSGSIZE, E::Truncated { message_bytes: 2, buffer_bytes: 1 }),
        link(ADMA_EPIPE, E::PeerDisconnected(DisconnectReason::Exited.into())),
        link(ADMA_EPIPE, E::PeerDisconnected(DisconnectReason::Closed.into())),
        link(ADMA_EPROTO, E::PeerDisconnected(DisconnectReason::ProtocolViolation("no").into())),
        link(ADMA_ECANCELED, E::Closed),
        link(ADMA_ECANCELED, E::Cancelled("send".into())),
        link(ADMA_ENXIO, E::BadMemory(MemorySide::Peer)),
        link(ADMA_ECHILD, E::Forked),
        link(ADMA_ESTALE, E::Withdrawn),
        link(ADMA_EACCES, E::NotPermitted { asked: Rights::WRITE, given: Rights::READ }),
        link(ADMA_EHOSTUNREACH, E::Unreachable(None)),
        link(ADMA_EHOSTUNREACH, E::Unreachable(Some(CrossMemoryDenied::Disabled))),
        link(ADMA_EXDEV, V::ForeignHandle.into()),
        link(ADMA_ERANGE, outside.into()),
        link(ADMA_EINVAL, V::MisalignedVariable(4).into()),
        link(ADMA_EMFILE, V::TooManyWindows.into()),
    ]
}

/// The same for GPUs.
fn one_of_each_of_gpus() -> Vec<(c_int, CallError)> {
    let said = |code| DriverError { call: "cuMemAlloc", code };
    let pin = |code, error: PinError| (code, CallError::from(error));
    let range = PageRange::covering(4096, 1).unwrap();
    let (what, fix) = ("this", "that");
    vec![
        (ADMA_ENOMEM, said(2).into()),
        (ADMA_EIO, said(719).into()),
        pin(ADMA_ENXIO, PinError::BadMemory { range }),
        pin(ADMA_EOVERFLOW, PinError::InvalidRange { address: 1, length: usize::MAX }),
        pin(ADMA_EOPNOTSUPP, PinError::Unsupported { what, fix }),
        pin(ADMA_ENOMEM, PinError::OutOfMemory),
        pin(ADMA_EIO, PinError::Refused { what, code: 5 }),
    ]
}

fn all() -> impl Iterator<Item = (c_int, CallError)> {
    one_of_each().into_iter().chain(one_of_each_of_links()).chain(one_of_each_of_gpus())
}

#[test]
fn every_error_of_the_core_has_the_code_that_is_documented_for_it() {
    for (code, failure) in all() {
        assert_eq!(failure.code, code, "{}", failure.text);
        assert!(!failure.text.is_empty());
    }
}

#[test]
fn every_code_has_a_text_of_its_own() {
    let mut codes: HashSet<_> = all().map(|(code, _)| code).collect();
    codes.extend([0, ADMA_ENOTRECOVERABLE, ADMA_ENOMSG, ADMA_EINPROGRESS, ADMA_EALREADY]);
    let texts: HashSet<_> = codes.iter().map(|code| text(*code)).collect();
    assert_eq!(texts.len(), codes.len());
    assert!(!texts.contains(text(c_int::MIN)));
}

#[test]
fn a_code_that_does_not_exist_has_a_text_too() {
    assert_eq!(text(-9999), c"unknown error code");
    assert_eq!(text(c_int::MIN), c"unknown error code");
    assert_eq!(text(c_int::MAX), c"not an error");
}
