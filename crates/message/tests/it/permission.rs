//! Processes without access to each other's memory, for real: disabled, filtered, another user,
//! another namespace. Messages of all sizes still arrive, and the cause is reported.

use std::process::{Command, Stdio};

use memferry_message::{
    ConnectError, CrossMemoryDenied, Endpoint, EndpointBuilder, Error, Peer, TAG_ALL,
};
use memferry_testing::message::process::{self, Child, setting};
use memferry_testing::message::traces::Folder;
use memferry_testing::message::{patient, unique};
use memferry_testing::pattern::{first_wrong, pattern};
use memferry_testing::{Requirement, skip};

const SIZES: [usize; 9] = [0, 1, 48, 49, 5000, 20_000, 300_001, 1 << 20, (5 << 20) + 3];
const NOBODY: u32 = 65534;

/// Messages of all sizes from one side to the other.
fn send_all(endpoint: &Endpoint, to: Peer) {
    for (tag, size) in SIZES.into_iter().enumerate() {
        endpoint.send(to, tag as u64, &pattern(size, tag as u64)).unwrap();
    }
}

fn receive_all(endpoint: &Endpoint, from: Peer) {
    for (tag, size) in SIZES.into_iter().enumerate() {
        let mut buffer = vec![0; size];
        let received = endpoint.recv(from, tag as u64, TAG_ALL, &mut buffer).unwrap();
        assert_eq!(received.length, size as u64);
        assert_eq!(first_wrong(&buffer, tag as u64), None, "{size} bytes");
    }
}

/// Messages in shareable memory, which both sides can map in any case.
fn exchange_shareable(endpoint: &Endpoint, peer: Peer) {
    let mut mine = memferry_message::ShareableBuffer::new(3 << 20).unwrap();
    memferry_testing::pattern::fill(&mut mine, 4);
    let send = endpoint.isend(peer, 99, mine).unwrap();
    let theirs = memferry_message::ShareableBuffer::new(3 << 20).unwrap();
    let receive = endpoint.irecv(peer, 99, TAG_ALL, theirs).unwrap();
    assert_eq!(first_wrong(&receive.wait().unwrap().1, 4), None);
    send.wait().unwrap();
}

/// The other process: without access, it exchanges everything and reports the cause.
fn behind_the_gate() {
    let gate = setting("MEMFERRY_TEST_GATE");
    match gate.as_str() {
        "eperm" => filter(libc::EPERM),
        "enosys" => filter(libc::ENOSYS),
        // SAFETY: changes who may access this process.
        "not dumpable" => assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }, 0),
        _ => {}
    }
    let builder = EndpointBuilder::new().allow_uid(0).allow_uid(NOBODY);
    let endpoint = builder.open(&unique("behind")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let reach = endpoint.peer_access(peer).unwrap();
    if gate == "exec" {
        use std::os::unix::process::CommandExt;
        let _send = endpoint.isend(peer, 7, pattern(1 << 20, 7)).unwrap();
        std::io::read_to_string(std::io::stdin()).unwrap();
        panic!("{}", Command::new("sleep").arg("60").exec());
    }
    if gate == "wait" || gate == "not dumpable" {
        // The test ends this process.
        std::thread::sleep(memferry_testing::message::TIMEOUT);
    }
    endpoint.send(peer, 1000, format!("{reach:?}").as_bytes()).unwrap();
    send_all(&endpoint, peer);
    receive_all(&endpoint, peer);
    exchange_shareable(&endpoint, peer);
}

/// Makes the system calls for cross-memory access fail from now on.
fn filter(error: i32) {
    memferry_testing::message::filter::refuse(
        &[libc::SYS_process_vm_readv, libc::SYS_process_vm_writev],
        error,
    );
}

fn gated(gate: &str, endpoint: &Endpoint) -> Command {
    gated_by(process::command("behind the gate"), gate, endpoint)
}

fn gated_by(mut command: Command, gate: &str, endpoint: &Endpoint) -> Command {
    command.env("MEMFERRY_TEST_GATE", gate).env("MEMFERRY_TEST_NAME", endpoint.name());
    command
}

/// Exchanges everything with a process without access; returns its report.
fn exchange(endpoint: &Endpoint, command: &mut Command) -> String {
    let child = Child::spawn(command);
    let mut words = vec![0; 200];
    let received = endpoint.recv(memferry_message::Source::Any, 1000, TAG_ALL, &mut words).unwrap();
    words.truncate(received.length as usize);
    receive_all(endpoint, received.source);
    send_all(endpoint, received.source);
    exchange_shareable(endpoint, received.source);
    child.finish();
    String::from_utf8(words).unwrap()
}

fn here() -> Endpoint {
    EndpointBuilder::new().allow_uid(NOBODY).open(&unique("here")).unwrap()
}

/// Fails if the reported access is not denied for this cause. Where the machine itself denies all
/// access, that cause is accepted where it cannot be distinguished.
fn check(reach: &str, gate: CrossMemoryDenied) {
    let denied = |gate: CrossMemoryDenied| {
        format!("PeerAccess {{ read: false, write: false, denied: Some({gate:?}) }}")
    };
    let scope = memferry_sys::cross_memory::ptrace_scope();
    let by_machine = scope > 0 && reach == denied(CrossMemoryDenied::PtraceScope(scope));
    assert!(reach == denied(gate) || by_machine, "{reach} instead of {gate:?}");
}

#[test]
fn switched_off_by_the_environment() {
    let endpoint = here();
    let reach = exchange(&endpoint, gated("", &endpoint).env("MEMFERRY_CMA", "off"));
    check(&reach, CrossMemoryDenied::Disabled);
}

#[test]
fn a_filter_that_forbids_or_hides_the_calls() {
    for gate in ["eperm", "enosys"] {
        let endpoint = here();
        let reach = exchange(&endpoint, &mut gated(gate, &endpoint));
        check(&reach, CrossMemoryDenied::Filtered);
    }
}

#[test]
fn a_filter_on_both_sides() {
    let name = unique("filtered");
    let spawn = |rank: &str| {
        let mut command = process::command("pair");
        command.env("MEMFERRY_TEST_NAME", &name).env("MEMFERRY_TEST_RANK", rank);
        Child::spawn(&mut command)
    };
    for child in [spawn("0"), spawn("1")] {
        child.finish();
    }
}

/// One of two processes of a job, neither of which may access the other.
fn filtered_pair() {
    filter(libc::EPERM);
    let rank: usize = setting("MEMFERRY_TEST_RANK").parse().unwrap();
    let job = patient().join(&setting("MEMFERRY_TEST_NAME"), rank, 2).unwrap();
    let peer = job.peer(1 - rank);
    let reach = job.endpoint().peer_access(peer).unwrap();
    check(&format!("{reach:?}"), CrossMemoryDenied::Filtered);
    for turn in 0..2 {
        if turn == rank {
            send_all(job.endpoint(), peer);
        } else {
            receive_all(job.endpoint(), peer);
        }
    }
    exchange_shareable(job.endpoint(), peer);
}

#[test]
fn access_that_is_refused_in_mid_life_costs_no_message() {
    for error in ["EPERM", "ENOMEM"] {
        for path in ["", "single", "cooperative"] {
            for refused in ["both", "1"] {
                let name = unique("refused");
                let spawn = |rank: &str| {
                    let mut command = process::command("refused");
                    let command = command
                        .env("MEMFERRY_TEST_NAME", &name)
                        .env("MEMFERRY_TEST_RANK", rank)
                        .env("MEMFERRY_TEST_ERROR", error)
                        .env("MEMFERRY_TEST_PATH", path)
                        .env("MEMFERRY_TEST_REFUSED", refused);
                    Child::spawn(command)
                };
                for child in [spawn("0"), spawn("1")] {
                    child.finish();
                }
            }
        }
    }
}

/// One of two processes of which one or both lose access at some message.
fn refused_pair() {
    use memferry_message::plan::PathKind;
    let rank: usize = setting("MEMFERRY_TEST_RANK").parse().unwrap();
    let builder = match setting("MEMFERRY_TEST_PATH").as_str() {
        "single" => patient().path(PathKind::Single),
        "cooperative" => patient().path(PathKind::Cooperative),
        _ => patient(),
    };
    let job = builder.join(&setting("MEMFERRY_TEST_NAME"), rank, 2).unwrap();
    let (endpoint, peer) = (job.endpoint(), job.peer(1 - rank));
    let could_read = endpoint.peer_access(peer).unwrap().read;
    let exchange = || {
        for turn in 0..2 {
            if turn == rank {
                send_all(endpoint, peer);
            } else {
                receive_all(endpoint, peer);
            }
        }
    };
    exchange();
    let is_refused = rank == 1 || setting("MEMFERRY_TEST_REFUSED") == "both";
    let lasts = setting("MEMFERRY_TEST_ERROR") == "EPERM";
    if is_refused {
        filter(if lasts { libc::EPERM } else { libc::ENOMEM });
    }
    exchange();
    exchange();
    assert_eq!(endpoint.peer_access(peer).unwrap().read, could_read && !(is_refused && lasts));
    exchange_shareable(endpoint, peer);
}

#[test]
fn a_peer_that_executes_another_program_is_gone() {
    let endpoint = here();
    let mut child = Child::spawn(gated("exec", &endpoint).stdin(Stdio::piped()));
    let announced = endpoint.probe(memferry_message::Source::Any, 7, TAG_ALL).unwrap();
    drop(child.take_input());
    let comm = format!("/proc/{}/comm", child.id());
    memferry_testing::message::until("it is another program", || {
        std::fs::read_to_string(&comm).is_ok_and(|name| name.trim() == "sleep")
    });
    // Its process is alive, and the announced memory is not mapped.
    let mut buffer = vec![0; announced.length as usize];
    endpoint.recv(announced.source, 7, TAG_ALL, &mut buffer).unwrap_err();
    memferry_testing::message::until("it has exited", || {
        endpoint.progress();
        endpoint.peers().is_empty()
    });
    let error = endpoint.recv(announced.source, 7, TAG_ALL, &mut buffer).unwrap_err();
    assert!(matches!(error, Error::PeerDisconnected(_)), "{error}");
    assert!(child.ended().is_none());
    child.kill();
}

fn is_root() -> bool {
    // SAFETY: reads the user id.
    unsafe { libc::geteuid() == 0 }
}

#[test]
fn another_user_is_let_in_where_it_is_allowed() {
    use std::os::unix::process::CommandExt;
    if !is_root() {
        return skip(Requirement::Root, "only root can become another user");
    }
    let (endpoint, folder) = (here(), Folder::new("other-user"));
    let command = process::command_in(folder.path(), "behind the gate");
    let reach = exchange(&endpoint, gated_by(command, "", &endpoint).uid(NOBODY));
    check(&reach, CrossMemoryDenied::OtherUser);
}

#[test]
fn the_memory_of_another_user_is_not_touched_even_where_the_kernel_would_permit_it() {
    use std::os::unix::process::CommandExt;
    if !is_root() {
        return skip(Requirement::Root, "only root can become another user");
    }
    // Root may access every process. It does not, because others could direct it into programs that
    // they may not access themselves.
    for (uid, gid) in [(NOBODY, NOBODY), (NOBODY, 0), (0, NOBODY)] {
        let endpoint = here();
        let mut child = Child::spawn(gated("wait", &endpoint).uid(uid).gid(gid));
        let mut reach = None;
        memferry_testing::message::until("it has connected", || {
            endpoint.progress();
            reach = endpoint.peers().first().map(|peer| endpoint.peer_access(*peer).unwrap());
            reach.is_some()
        });
        child.kill();
        let reach = format!("{:?}", reach.unwrap());
        assert_eq!(
            reach,
            format!("PeerAccess {{ read: false, write: false, denied: Some(OtherUser) }}")
        );
    }
}

#[test]
fn a_process_that_is_not_dumpable_is_called_that() {
    use std::os::unix::process::CommandExt;
    let mut command = process::command("not dumpable");
    // Root may access those too.
    let command = if is_root() { command.uid(NOBODY).gid(NOBODY) } else { &mut command };
    Child::spawn(command).finish();
}

/// Connects to another process of the same user that is not dumpable, and checks the reported
/// cause.
fn beside_one_not_dumpable() {
    let endpoint = here();
    let mut child = Child::spawn(&mut gated("not dumpable", &endpoint));
    let mut reach = None;
    memferry_testing::message::until("it has connected", || {
        endpoint.progress();
        reach = endpoint.peers().first().map(|peer| endpoint.peer_access(*peer).unwrap());
        reach.is_some()
    });
    child.kill();
    let denied = reach.unwrap().denied.expect("access is denied").to_string();
    assert!(denied.contains("not dumpable") && denied.contains("PR_SET_DUMPABLE"), "{denied}");
}

#[test]
fn another_user_is_refused_where_it_is_not_allowed() {
    use std::os::unix::process::CommandExt;
    if !is_root() {
        return skip(Requirement::Root, "only root can become another user");
    }
    let (name, mine) = (unique("nobody's"), unique("root's"));
    let strict = EndpointBuilder::new().background(true).open(&mine).unwrap();
    let folder = Folder::new("other-user");
    let mut command = process::command_in(folder.path(), "other user");
    command.env("MEMFERRY_TEST_NAME", &name).env("MEMFERRY_TEST_OTHER", &mine);
    let mut child = Child::spawn(command.uid(NOBODY).stdin(Stdio::piped()));
    let mut error = None;
    memferry_testing::message::until("it listens", || {
        error = strict.connect(&name).err();
        !matches!(error, Some(Error::Connect(ConnectError::NoListener(_))))
    });
    assert_eq!(error, Some(Error::Connect(ConnectError::UserNotAllowed(NOBODY))));
    assert!(error.unwrap().to_string().contains("65534"));
    drop(child.take_input());
    child.finish();
    assert!(strict.peers().is_empty());
}

/// Another user, who is rejected whether it allows root or not.
fn other_user() {
    let other = setting("MEMFERRY_TEST_OTHER");
    let endpoint = Endpoint::open(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let error = endpoint.connect(&other).unwrap_err();
    assert_eq!(error, Error::Connect(ConnectError::UserNotAllowed(0)));
    let trusting = EndpointBuilder::new().allow_user("root").open(&unique("trusting")).unwrap();
    let error = trusting.connect(&other).unwrap_err();
    assert!(matches!(error, Error::Connect(ConnectError::Rejected(..))), "{error}");
    assert!(error.to_string().contains("allow_uid"), "{error}");
    // Root connects at the same time.
    std::io::read_to_string(std::io::stdin()).unwrap();
}

/// Enters a new namespace.
fn unshare(kind: i32) -> std::io::Result<()> {
    // SAFETY: changes only what this process sees of others.
    match unsafe { libc::unshare(kind) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Returns whether such namespaces can be created.
fn may_unshare(kind: i32) -> bool {
    let mut command = Command::new("true");
    process::prepare(&mut command, move || unshare(kind));
    let may = command.status().is_ok();
    if !may {
        skip(Requirement::Namespaces, "this kind of namespace cannot be made here");
    }
    may
}

#[test]
fn another_user_namespace() {
    if may_unshare(libc::CLONE_NEWUSER) {
        let endpoint = here();
        let mut command = gated("", &endpoint);
        process::prepare(&mut command, || unshare(libc::CLONE_NEWUSER));
        check(&exchange(&endpoint, &mut command), CrossMemoryDenied::UserNamespace);
    }
}

#[test]
fn another_pid_namespace() {
    if may_unshare(libc::CLONE_NEWPID) {
        let endpoint = here();
        let mut command = process::command("parent of a namespace");
        command.env("MEMFERRY_TEST_GATE", "").env("MEMFERRY_TEST_NAME", endpoint.name());
        check(&exchange(&endpoint, &mut command), CrossMemoryDenied::PidNamespace);
    }
}

#[test]
fn other_processes_begin_here() {
    match process::role().as_deref() {
        Some("behind the gate") => behind_the_gate(),
        Some("pair") => filtered_pair(),
        Some("refused") => refused_pair(),
        Some("not dumpable") => beside_one_not_dumpable(),
        Some("other user") => other_user(),
        Some(_) => {
            // The namespace is for the children of the process that creates it.
            unshare(libc::CLONE_NEWPID).unwrap();
            Child::spawn(&mut process::command("behind the gate")).finish();
        }
        None => {}
    }
}
