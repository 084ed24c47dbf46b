//! Two processes over a link: the n-th write matches the n-th read, from any memory to any memory.
//!
//! `cargo run --release --example link` starts both sides.

#![allow(clippy::print_stdout, reason = "an example shows something")]

use std::process::Command;

use memferry::message::{Error, Link, Listener};

const SIZES: [usize; 4] = [16, 4 << 10, 1 << 20, 64 << 20];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The second process runs this program again, with the name to connect to.
    match std::env::args().nth(1) {
        Some(name) => Ok(write_everything(&name)?),
        None => read_everything(),
    }
}

fn read_everything() -> Result<(), Box<dyn std::error::Error>> {
    let name = format!("memferry-example-link-{}", std::process::id());
    let listener = Listener::bind(&name)?;
    let mut child = Command::new(std::env::current_exe()?).arg(&name).spawn()?;
    let link = listener.accept()?;

    for size in SIZES {
        // Reads can be posted before the data exists; `wait` returns the buffer.
        let read = link.iread(vec![0; size])?;
        // ... compute something here ...
        let (received, buffer) = read.wait()?;
        assert!(buffer.iter().all(|&byte| byte == size.ilog2() as u8));
        println!("read {} bytes", received.length);
    }

    // A buffer that is too short gets the bytes that fit, and the read returns an error.
    let mut short = [0; 5];
    match link.read(&mut short) {
        Err(Error::Truncated { message_bytes, buffer_bytes }) => {
            println!("a write of {message_bytes} bytes met a read of {buffer_bytes}: {short:?}");
        }
        other => panic!("expected to be told that it was cut off: {other:?}"),
    }

    // The peer disconnects: pending operations fail instead of blocking.
    let gone = link.read(&mut short).unwrap_err();
    println!("then: {gone}");
    child.wait()?;
    Ok(())
}

fn write_everything(name: &str) -> Result<(), Error> {
    let link = Link::connect(name)?;
    for size in SIZES {
        link.write(&vec![size.ilog2() as u8; size])?;
    }
    link.write(b"too long for that buffer")
}
