//! Tests of `memferry top` from outside: this process copies and sends, and the program shows exactly that.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use memferry::Ferry;
use memferry::message::{Endpoint, Source, TAG_ANY};
use serde_json::Value;

fn memferry(words: &[&str]) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("memferry"));
    command.arg("top").args(words).env("MEMFERRY_PROFILE", "off");
    command
}

fn output(words: &[&str]) -> String {
    let output = memferry(words).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// What the program shows of a process.
fn seen(pid: u32) -> Value {
    let words = ["--once", "--json", "--interval", "0.05", "--pid", &pid.to_string()];
    let all: Value = serde_json::from_str(&output(&words)).unwrap();
    assert_eq!(all["processes"].as_array().unwrap().len(), 1);
    all["processes"][0].clone()
}

/// The sum of a counter, or of a counter by label, over the blocks of a kind.
fn sum(process: &Value, kind: &str, counter: &str) -> u64 {
    let blocks = process["blocks"].as_array().unwrap().iter().filter(|block| block["kind"] == kind);
    let value = |block: &Value| match &block["counters"][counter] {
        Value::Object(parts) => parts.values().filter_map(Value::as_u64).sum(),
        value => value.as_u64().unwrap_or(0),
    };
    blocks.map(value).sum()
}

/// Tests that count what this process does run one after another.
fn one_at_a_time() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A copy and some messages of this process to itself.
fn work(ferry: &Ferry, endpoint: &Endpoint) {
    let transfer = ferry.icopy(vec![1u8; 1 << 20], vec![0u8; 1 << 20]).unwrap();
    transfer.wait().unwrap();
    let own = endpoint.self_peer().unwrap();
    for length in [8, 8, 8, 3000] {
        let mut buffer = vec![0; length];
        endpoint.send(own, 1, &vec![7; length]).unwrap();
        endpoint.recv(Source::Any, 1, TAG_ANY, &mut buffer).unwrap();
    }
}

#[test]
fn what_a_process_does_is_counted_exactly() {
    let _turn = one_at_a_time();
    let ferry = Ferry::new().unwrap();
    let name = format!("top-counts-{}", std::process::id());
    let endpoint = Endpoint::open(&name).unwrap();
    work(&ferry, &endpoint);
    let pid = std::process::id();
    let before = seen(pid);
    for _ in 0..5 {
        work(&ferry, &endpoint);
    }
    let after = seen(pid);
    let rise = |kind, counter| sum(&after, kind, counter) - sum(&before, kind, counter);
    assert_eq!((rise("peer", "sent"), rise("peer", "received")), (20, 20));
    assert_eq!(rise("peer", "sent_bytes"), 5 * 3024);
    assert_eq!(rise("peer", "sent_sizes"), 20);
    assert_eq!(rise("thread", "copy_bytes"), 5 << 20);
    assert_eq!(
        after["totals"]["messages"].as_u64().unwrap()
            - before["totals"]["messages"].as_u64().unwrap(),
        40
    );
    let peer = after["blocks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|block| block["kind"] == "peer" && block["name"] == name.as_str());
    assert_eq!(peer.unwrap()["counters"]["sent"]["inline"], 18);
    let text = output(&["--once", "--interval", "0.05", "--pid", &pid.to_string()]);
    let path = format!("{name} inline");
    for part in ["PID", "channels", "cpu 0", "peers", &path, "messages by size"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(output(&["--once", "--interval", "0.05", "--sort", "pid"]).contains(&pid.to_string()));
}

/// Checks the syntax of OpenMetrics: a type before the samples of each metric, numbers, and the end.
fn check_metrics(text: &str) {
    assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1);
    let (mut metric, mut seen) = (String::new(), std::collections::HashSet::new());
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(rest) = line.strip_prefix("# UNIT ") {
            let (name, unit) = rest.split_once(' ').unwrap();
            assert!(name == metric && name.ends_with(&format!("_{unit}")), "{line}");
            continue;
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert!(seen.insert(name.to_owned()), "{name} comes twice");
            metric = name.to_owned();
            continue;
        }
        let (name, rest) = line.split_once('{').unwrap();
        let suffix = name.strip_prefix(&metric).unwrap();
        assert!(["", "_total", "_bucket"].contains(&suffix), "{line}");
        let (labels, value) = rest.rsplit_once("} ").unwrap();
        assert!(seen.insert(format!("{name} {labels}")), "{line} comes twice");
        assert!(labels.split("\",").all(|label| label.contains("=\"")), "{line}");
        value.parse::<u64>().unwrap();
    }
}

#[test]
fn metrics_are_printed_and_served_on_the_loopback_interface() {
    let _turn = one_at_a_time();
    let ferry = Ferry::new().unwrap();
    let name = format!("top-metrics-{}", std::process::id());
    let endpoint = Endpoint::open(&name).unwrap();
    work(&ferry, &endpoint);
    let pid = std::process::id().to_string();
    let text = output(&["--metrics", "--pid", &pid]);
    check_metrics(&text);
    assert!(text.contains("memferry_peer_sent_bytes_total{pid="));
    let server = memferry(&["--listen", "127.0.0.1:0"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut server = KilledOnDrop(server);
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
    let get = |path: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    };
    let reply = get("/metrics");
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("application/openmetrics-text"));
    check_metrics(body);
    assert!(body.contains(&name));
    assert!(get("/other").starts_with("HTTP/1.1 404"));
}

struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_process_that_is_switched_off_is_not_seen() {
    for (value, is_seen) in [("off", false), ("on", true)] {
        // `memferry doctor`'s partner opens an endpoint and waits for its standard input to close.
        let name = format!("top-switch-{value}-{}", std::process::id());
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("memferry"));
        command.args(["partner", "--name", &name]).env("MEMFERRY_STATS", value);
        command.env("MEMFERRY_PROFILE", "off").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut partner = KilledOnDrop(command.spawn().unwrap());
        // It prints a line when it listens.
        let mut line = String::new();
        BufReader::new(partner.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let pid = partner.0.id().to_string();
        let found = memferry(&["--once", "--interval", "0.05", "--pid", &pid]).output().unwrap();
        assert_eq!(found.status.success(), is_seen, "{value}");
        if !is_seen {
            let said = String::from_utf8_lossy(&found.stderr).into_owned();
            assert!(said.contains("MEMFERRY_STATS=off"), "{said}");
        }
    }
}

#[test]
fn without_a_terminal_the_options_for_text_are_named() {
    let refused = memferry(&[]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--once"));
    let refused = memferry(&["--listen", "0.0.0.0:80"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("loopback"));
}

/// A terminal: the end that a user sees, and the end of the program.
fn terminal() -> (File, OwnedFd) {
    let (mut user, mut program) = (-1, -1);
    let size = libc::winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the descriptors are valid for writes, the size is one, and nothing else is asked for.
    let opened = unsafe {
        libc::openpty(&mut user, &mut program, std::ptr::null_mut(), std::ptr::null(), &size)
    };
    assert_eq!(opened, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: both were opened just now.
    unsafe { (File::from_raw_fd(user), OwnedFd::from_raw_fd(program)) }
}

/// Whether the terminal gathers lines and shows what is typed, as shells expect it.
fn is_ordinary(terminal: &OwnedFd) -> bool {
    // SAFETY: zeros are a value of the structure, which is valid for writes.
    let modes = unsafe {
        let mut modes: libc::termios = std::mem::zeroed();
        assert_eq!(libc::tcgetattr(terminal.as_raw_fd(), &mut modes), 0);
        modes
    };
    let both = libc::ICANON | libc::ECHO;
    modes.c_lflag & both == both
}

#[test]
fn a_signal_ends_the_program_and_the_terminal_is_as_it_was() {
    const LEAVE_SCREEN: &[u8] = b"\x1b[?1049l";
    const SHOW_CURSOR: &[u8] = b"\x1b[?25h";
    for signal in [libc::SIGTERM, libc::SIGHUP] {
        let (mut user, program) = terminal();
        let end = || Stdio::from(program.try_clone().unwrap());
        let mut command = memferry(&["--interval", "3600"]);
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let mut child = KilledOnDrop(child);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let reader = Arc::clone(&seen);
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(length) = user.read(&mut part) {
                reader.lock().unwrap().extend_from_slice(&part[..length]);
            }
        });
        let has =
            |text: &[u8]| seen.lock().unwrap().windows(text.len()).any(|window| window == text);
        memferry_testing::until("the screen is drawn", || has(b"q quit"));
        assert!(!is_ordinary(&program) && !has(LEAVE_SCREEN));
        // SAFETY: the process is a child that was not waited for.
        assert_eq!(unsafe { libc::kill(child.0.id() as i32, signal) }, 0);
        assert_eq!(child.0.wait().unwrap().signal(), Some(signal));
        memferry_testing::until("the screen is left", || has(LEAVE_SCREEN) && has(SHOW_CURSOR));
        assert!(is_ordinary(&program));
    }
}
