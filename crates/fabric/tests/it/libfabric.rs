//! The provider in a real libfabric, with the programs of libfabric: `fi_info` lists it, and `fi_pingpong`
//! runs over it between two processes. Where the programs are not installed, nothing is checked.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use memferry_testing::{Requirement, skip, until};

/// A folder that contains the provider alone: libfabric opens every library in the folder.
fn provider() -> tempfile::TempDir {
    // Cargo puts the library beside the tests that depend on it.
    let test = std::env::current_exe().expect("a test knows where it is");
    let library: PathBuf = test.with_file_name("libmemferry_fi.so");
    assert!(library.exists(), "{} is missing", library.display());
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::os::unix::fs::symlink(&library, folder.path().join("libmemferry_fi.so")).expect("a link");
    folder
}

fn command(program: &str, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("FI_PROVIDER_PATH", folder).args(["-p", "memferry"]).stdin(Stdio::null());
    command
}

/// Starts a program, if it is installed.
fn start(command: &mut Command) -> Option<Child> {
    match command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let program = command.get_program().display();
            let why = format!("{program} is not installed: apt install libfabric-bin");
            skip(Requirement::Libfabric, why);
            None
        }
        started => Some(started.expect("the program can be started")),
    }
}

/// The output of a program, which must exit with success.
fn output_of(child: Child) -> String {
    let output = child.wait_with_output().expect("it ends");
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{}\n{}", text[0], text[1]);
    text[0].clone()
}

#[test]
fn libfabric_shows_the_provider() {
    let folder = provider();
    let Some(shown) = start(&mut command("fi_info", folder.path())) else { return };
    let text = output_of(shown);
    assert!(text.contains("provider: memferry"), "{text}");
    assert_eq!(text.matches("provider:").count(), 1, "{text}");
    assert!(text.contains("type: FI_EP_RDM"), "{text}");
}

/// A TCP port that is free at the time of the call.
fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("there is a free port");
    listener.local_addr().expect("it has an address").port()
}

/// Whether a process listens on a TCP port, according to the kernel's list.
fn is_listened_at(port: u16) -> bool {
    const LISTENS: &str = "0A";
    let is_it = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let here = words.get(1).is_some_and(|here| here.ends_with(&format!(":{port:04X}")));
        here && words.get(3) == Some(&LISTENS)
    };
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .any(|list| std::fs::read_to_string(list).is_ok_and(|list| list.lines().any(is_it)))
}

#[test]
fn two_processes_play_ping_pong() {
    let folder = provider();
    let play = |sides: &[&str]| {
        let mut command = command("fi_pingpong", folder.path());
        start(command.args(["-e", "rdm", "-I", "50"]).args(sides))
    };
    let (server, port) = loop {
        let port = free_port();
        let Some(mut server) = play(&["-B", &port.to_string()]) else { return };
        let mut is_over = false;
        until("the server listens", || {
            is_over = server.try_wait().expect("it can be asked").is_some();
            is_over || is_listened_at(port)
        });
        // Another process may have taken the port meanwhile.
        if !is_over || is_listened_at(port) {
            break (server, port.to_string());
        }
    };
    let client = play(&["-P", &port, "127.0.0.1"]).expect("the server could be started");
    for text in [output_of(client), output_of(server)] {
        assert!(text.contains("=50"), "all messages are answered: {text}");
    }
}
