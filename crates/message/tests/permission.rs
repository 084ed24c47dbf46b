//! Processes that may not look into each other, for real: switched off, filtered, another user,
//! another namespace. Messages of all sizes arrive nevertheless, and the gate is named.

mod support;

use std::process::{Command, Stdio};

use memferry_message::{Builder, ConnectError, Denied, Endpoint, Error, Peer, TAG_ALL};
use memferry_testing::{Requirement, skip};
use support::memory::{first_wrong, pattern};
use support::process::{self, Child, setting};
use support::traces::Folder;
use support::unique;

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

/// Messages in shareable memory, which both sides may map whatever else they may not.
fn exchange_shareable(endpoint: &Endpoint, peer: Peer) {
    let mut mine = memferry_message::ShareableBuffer::new(3 << 20).unwrap();
    support::memory::fill(&mut mine, 4);
    let send = endpoint.isend(peer, 99, mine).unwrap();
    let theirs = memferry_message::ShareableBuffer::new(3 << 20).unwrap();
    let receive = endpoint.irecv(peer, 99, TAG_ALL, theirs).unwrap();
    assert_eq!(first_wrong(&receive.wait().unwrap().1, 4), None);
    send.wait().unwrap();
}

/// The other process: behind the gate, it exchanges everything and says what stood in the way.
fn behind_the_gate() {
    let gate = setting("MEMFERRY_TEST_GATE");
    match gate.as_str() {
        "eperm" => filter(libc::EPERM),
        "enosys" => filter(libc::ENOSYS),
        // SAFETY: changes who may look into this process.
        "not dumpable" => assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }, 0),
        _ => {}
    }
    let builder = Builder::new().allow_uid(0).allow_uid(NOBODY);
    let endpoint = builder.open(&unique("behind")).unwrap();
    let peer = endpoint.connect(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let reach = endpoint.reach(peer).unwrap();
    if gate == "exec" {
        use std::os::unix::process::CommandExt;
        let _send = endpoint.isend(peer, 7, pattern(1 << 20, 7)).unwrap();
        std::io::read_to_string(std::io::stdin()).unwrap();
        panic!("{}", Command::new("sleep").arg("60").exec());
    }
    if gate == "wait" || gate == "not dumpable" {
        // Whoever started this process ends it.
        std::thread::sleep(support::PATIENCE);
    }
    endpoint.send(peer, 1000, format!("{reach:?}").as_bytes()).unwrap();
    send_all(&endpoint, peer);
    receive_all(&endpoint, peer);
    exchange_shareable(&endpoint, peer);
}

/// Makes the calls for cross-memory access fail from now on.
fn filter(error: i32) {
    support::filter::refuse(&[libc::SYS_process_vm_readv, libc::SYS_process_vm_writev], error);
}

fn gated(gate: &str, endpoint: &Endpoint) -> Command {
    gated_by(process::command("behind the gate"), gate, endpoint)
}

fn gated_by(mut command: Command, gate: &str, endpoint: &Endpoint) -> Command {
    command.env("MEMFERRY_TEST_GATE", gate).env("MEMFERRY_TEST_NAME", endpoint.name());
    command
}

/// Exchanges everything with a process behind a gate; returns what it says about its reach.
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
    Builder::new().allow_uid(NOBODY).open(&unique("here")).unwrap()
}

/// Fails if the reach that a process reports is not blocked by this gate. Where the machine itself
/// lets nobody look into others, that is named for what cannot be told apart from it.
fn check(reach: &str, gate: Denied) {
    let denied =
        |gate: Denied| format!("Reach {{ read: false, write: false, denied: Some({gate:?}) }}");
    let scope = memferry_sys::cross_memory::ptrace_scope();
    let by_machine = scope > 0 && reach == denied(Denied::PtraceScope(scope));
    assert!(reach == denied(gate) || by_machine, "{reach} instead of {gate:?}");
}

#[test]
fn switched_off_by_the_environment() {
    let endpoint = here();
    let reach = exchange(&endpoint, gated("", &endpoint).env("MEMFERRY_CMA", "off"));
    check(&reach, Denied::SwitchedOff);
}

#[test]
fn a_filter_that_forbids_or_hides_the_calls() {
    for gate in ["eperm", "enosys"] {
        let endpoint = here();
        let reach = exchange(&endpoint, &mut gated(gate, &endpoint));
        check(&reach, Denied::Filtered);
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

/// One of two processes of a job, neither of which may look into the other.
fn filtered_pair() {
    filter(libc::EPERM);
    let rank: usize = setting("MEMFERRY_TEST_RANK").parse().unwrap();
    let job = memferry_message::Job::join(&setting("MEMFERRY_TEST_NAME"), rank, 2).unwrap();
    let peer = job.peer(1 - rank);
    let reach = job.endpoint().reach(peer).unwrap();
    check(&format!("{reach:?}"), Denied::Filtered);
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

/// One of two processes of which one or both may not look into the other from some message on.
fn refused_pair() {
    use memferry_message::plan::PathKind;
    let rank: usize = setting("MEMFERRY_TEST_RANK").parse().unwrap();
    let builder = match setting("MEMFERRY_TEST_PATH").as_str() {
        "single" => Builder::new().path(PathKind::Single),
        "cooperative" => Builder::new().path(PathKind::Cooperative),
        _ => Builder::new(),
    };
    let job = builder.join(&setting("MEMFERRY_TEST_NAME"), rank, 2).unwrap();
    let (endpoint, peer) = (job.endpoint(), job.peer(1 - rank));
    let could_read = endpoint.reach(peer).unwrap().read;
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
    assert_eq!(endpoint.reach(peer).unwrap().read, could_read && !(is_refused && lasts));
    exchange_shareable(endpoint, peer);
}

#[test]
fn a_peer_that_executes_another_program_is_gone() {
    let endpoint = here();
    let mut child = Child::spawn(gated("exec", &endpoint).stdin(Stdio::piped()));
    let announced = endpoint.probe(memferry_message::Source::Any, 7, TAG_ALL).unwrap();
    drop(child.take_input());
    let comm = format!("/proc/{}/comm", child.id());
    support::until("it is another program", || {
        std::fs::read_to_string(&comm).is_ok_and(|name| name.trim() == "sleep")
    });
    // Its process lives on, and what was announced is not there.
    let mut buffer = vec![0; announced.length as usize];
    endpoint.recv(announced.source, 7, TAG_ALL, &mut buffer).unwrap_err();
    support::until("it is gone", || {
        endpoint.progress();
        endpoint.peers().is_empty()
    });
    let error = endpoint.recv(announced.source, 7, TAG_ALL, &mut buffer).unwrap_err();
    assert!(matches!(error, Error::PeerGone(_)), "{error}");
    assert!(child.ended().is_none());
    child.kill();
}

fn is_root() -> bool {
    // SAFETY: asks for a number.
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
    check(&reach, Denied::OtherUser);
}

#[test]
fn the_memory_of_another_user_is_not_touched_even_where_the_kernel_would_permit_it() {
    use std::os::unix::process::CommandExt;
    if !is_root() {
        return skip(Requirement::Root, "only root can become another user");
    }
    // Root may look into everybody. That others can lead it into programs which they may not look
    // into themselves is why it does not.
    for (uid, gid) in [(NOBODY, NOBODY), (NOBODY, 0), (0, NOBODY)] {
        let endpoint = here();
        let mut child = Child::spawn(gated("wait", &endpoint).uid(uid).gid(gid));
        let mut reach = None;
        support::until("it has connected", || {
            endpoint.progress();
            reach = endpoint.peers().first().map(|peer| endpoint.reach(*peer).unwrap());
            reach.is_some()
        });
        child.kill();
        let reach = format!("{:?}", reach.unwrap());
        assert_eq!(
            reach,
            format!("Reach {{ read: false, write: false, denied: Some(OtherUser) }}")
        );
    }
}

#[test]
fn a_process_that_is_not_dumpable_is_called_that() {
    use std::os::unix::process::CommandExt;
    let mut command = process::command("not dumpable");
    // Root may look into those too.
    let command = if is_root() { command.uid(NOBODY).gid(NOBODY) } else { &mut command };
    Child::spawn(command).finish();
}

/// Connects to another process of the same user that is not dumpable, and looks why it is out of
/// reach.
fn beside_one_not_dumpable() {
    let endpoint = here();
    let mut child = Child::spawn(&mut gated("not dumpable", &endpoint));
    let mut reach = None;
    support::until("it has connected", || {
        endpoint.progress();
        reach = endpoint.peers().first().map(|peer| endpoint.reach(*peer).unwrap());
        reach.is_some()
    });
    child.kill();
    let denied = reach.unwrap().denied.expect("it is out of reach").to_string();
    assert!(denied.contains("not dumpable") && denied.contains("PR_SET_DUMPABLE"), "{denied}");
}

#[test]
fn another_user_is_refused_where_it_is_not_allowed() {
    use std::os::unix::process::CommandExt;
    if !is_root() {
        return skip(Requirement::Root, "only root can become another user");
    }
    let (name, mine) = (unique("nobody's"), unique("root's"));
    let strict = Builder::new().background(true).open(&mine).unwrap();
    let folder = Folder::new("other-user");
    let mut command = process::command_in(folder.path(), "other user");
    command.env("MEMFERRY_TEST_NAME", &name).env("MEMFERRY_TEST_OTHER", &mine);
    let mut child = Child::spawn(command.uid(NOBODY).stdin(Stdio::piped()));
    let mut error = None;
    support::until("it listens", || {
        error = strict.connect(&name).err();
        !matches!(error, Some(Error::Connect(ConnectError::NobodyListens(_))))
    });
    assert_eq!(error, Some(Error::Connect(ConnectError::UserNotAllowed(NOBODY))));
    assert!(error.unwrap().to_string().contains("65534"));
    drop(child.take_input());
    child.finish();
    assert!(strict.peers().is_empty());
}

/// Another user, who is refused whether it allows root or not.
fn other_user() {
    let other = setting("MEMFERRY_TEST_OTHER");
    let endpoint = Endpoint::open(&setting("MEMFERRY_TEST_NAME")).unwrap();
    let error = endpoint.connect(&other).unwrap_err();
    assert_eq!(error, Error::Connect(ConnectError::UserNotAllowed(0)));
    let trusting = Builder::new().allow_user("root").open(&unique("trusting")).unwrap();
    let error = trusting.connect(&other).unwrap_err();
    assert!(matches!(error, Error::Connect(ConnectError::Refused(..))), "{error}");
    assert!(error.to_string().contains("allow_uid"), "{error}");
    // Root calls meanwhile.
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

/// Whether such namespaces can be made here at all.
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
        check(&exchange(&endpoint, &mut command), Denied::UserNamespace);
    }
}

#[test]
fn another_pid_namespace() {
    if may_unshare(libc::CLONE_NEWPID) {
        let endpoint = here();
        let mut command = process::command("parent of a namespace");
        command.env("MEMFERRY_TEST_GATE", "").env("MEMFERRY_TEST_NAME", endpoint.name());
        check(&exchange(&endpoint, &mut command), Denied::PidNamespace);
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
            // The namespace is for the children of whoever makes it.
            unshare(libc::CLONE_NEWPID).unwrap();
            Child::spawn(&mut process::command("behind the gate")).finish();
        }
        None => {}
    }
}
