//! A job of several processes: tagged messages, receives from any source, segments, shareable
//! memory.
//!
//! `cargo run --release --example endpoints` starts all of them.

#![allow(clippy::print_stdout, reason = "an example shows something")]

use std::io::IoSlice;
use std::process::Command;

use memferry::message::{Error, Job, ShareableBuffer, Source, TAG_ALL, TAG_ANY};

const SIZE: usize = 4;
/// Tags that distinguish the kinds of messages.
const GREETING: u64 = 1;
const RESULT: u64 = 2;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().collect();
    if let [_, name, rank] = words.as_slice() {
        return Ok(work(name, rank.parse()?)?);
    }
    let name = format!("memferry-example-{}", std::process::id());
    let program = std::env::current_exe()?;
    let start = |rank: usize| Command::new(&program).arg(&name).arg(rank.to_string()).spawn();
    let children: Vec<_> = (1..SIZE).map(start).collect::<Result<_, _>>()?;
    work(&name, 0)?;
    for mut child in children {
        assert!(child.wait()?.success());
    }
    Ok(())
}

fn work(name: &str, rank: usize) -> Result<(), Error> {
    // Returns when all four processes have joined and are connected to each other.
    let job = Job::join(name, rank, SIZE)?;
    let endpoint = job.endpoint();
    if rank == 0 { collect(&job) } else { contribute(&job) }?;
    endpoint.progress();
    Ok(())
}

fn collect(job: &Job) -> Result<(), Error> {
    let endpoint = job.endpoint();
    for _ in 1..SIZE {
        // Receives from any source, but only greetings: all bits of the tag must match.
        let mut text = [0; 64];
        let received = endpoint.recv(Source::Any, GREETING, TAG_ALL, &mut text)?;
        let text = String::from_utf8_lossy(&text[..received.length as usize]);
        println!("rank {:?} says: {text}", job.rank_of(received.source).unwrap());
    }
    for rank in 1..SIZE {
        // A probe returns the length before the buffer is allocated.
        let waiting = endpoint.probe(job.peer(rank), RESULT, TAG_ALL)?;
        let mut numbers = vec![0; waiting.length as usize];
        endpoint.recv(job.peer(rank), 0, TAG_ANY, &mut numbers)?;
        assert!(numbers.iter().all(|&number| number == rank as u8));
        println!("rank {rank} sent {} MiB", numbers.len() >> 20);
    }
    Ok(())
}

fn contribute(job: &Job) -> Result<(), Error> {
    let (endpoint, root) = (job.endpoint(), job.peer(0));
    let number = job.rank().to_string();
    let greeting = [IoSlice::new(b"hello from "), IoSlice::new(number.as_bytes())];
    endpoint.send(root, GREETING, &greeting[..])?;
    // The peer maps this memory: a message from it needs no system call.
    let mut numbers = ShareableBuffer::new(16 << 20).expect("memory");
    numbers.fill(job.rank() as u8);
    endpoint.send(root, RESULT, &numbers[..])
}
