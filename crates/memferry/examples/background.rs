//! A pipeline that computes on one block while the next one arrives: a progress thread receives
//! messages while the application makes no call.
//!
//! `cargo run --release --example background` starts both sides.

#![allow(clippy::print_stdout, reason = "an example shows something")]

use std::hint::black_box;
use std::process::Command;
use std::time::{Duration, Instant};

use memferry::message::{Endpoint, Error, Source, TAG_ALL};

const BLOCK: usize = 8 << 20;
const BLOCKS: u64 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Some(name) = std::env::args().nth(1) {
        return Ok(produce(&name)?);
    }
    let with = consume(true)?;
    let without = consume(false)?;
    println!("waited for blocks: {without:?} by the caller alone, {with:?} with the background");
    Ok(())
}

/// Computes on every block; returns the total time of waiting for blocks.
fn consume(background: bool) -> Result<Duration, Box<dyn std::error::Error>> {
    let name = format!("memferry-example-background-{background}-{}", std::process::id());
    let endpoint = Endpoint::builder().background(background).open(&name)?;
    let mut child = Command::new(std::env::current_exe()?).arg(&name).spawn()?;

    let receive = |number, buffer| endpoint.irecv(Source::Any, number, TAG_ALL, buffer);
    let mut next = receive(0, vec![0u8; BLOCK])?;
    let mut spare = vec![0u8; BLOCK];
    let mut waited = Duration::ZERO;
    for number in 1..=BLOCKS {
        let began = Instant::now();
        let (_, block) = next.wait()?;
        if number > 1 {
            waited += began.elapsed();
        }
        // The next block arrives while the program computes on this one.
        next = receive(number, spare)?;
        assert!(sum(&block) > 0);
        spare = block;
    }
    // No block follows the last one: dropping the handle cancels the receive.
    drop(next);
    child.wait()?;
    Ok(waited)
}

fn sum(block: &[u8]) -> u64 {
    let began = Instant::now();
    let mut sum = 0;
    while began.elapsed() < Duration::from_millis(4) {
        sum += block.iter().step_by(4096).map(|&byte| u64::from(black_box(byte))).sum::<u64>();
    }
    sum
}

fn produce(name: &str) -> Result<(), Error> {
    let endpoint = Endpoint::open(&format!("{name}-producer"))?;
    let consumer = endpoint.connect(name)?;
    let block = vec![1u8; BLOCK];
    for number in 0..BLOCKS {
        endpoint.send(consumer, number, &block)?;
    }
    Ok(())
}
