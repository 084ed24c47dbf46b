//! A message that has arrived in packets goes where it is wanted, over a network card that talks to
//! itself, while the program computes: one transfer, and one variable that tells of its end.
//!
//! `cargo run --release -p memferry --example deliver`
//!
//! Uses the first card that was handed over to programs (`memferry doctor` says how), and a model of
//! one elsewhere.

#![allow(clippy::print_stdout, reason = "an example shows something")]

use std::hint::black_box;
use std::sync::Arc;

use memferry::engine::device::ready;
use memferry::engine::nic::model::NicModel;
use memferry::engine::nic::{NicEngine, Settings};
use memferry::{Error, Ferry, Notification, Options};
use memferry_sys::vfio::pci::E1000E;

/// A buffer of the ring, and how much of it a packet fills.
const BUFFER: usize = 2 << 10;
const PACKET: usize = 1460;
const PACKETS: usize = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let card = Arc::new(card()?);
    // The only engine: beside processors, which are quicker, it would not be chosen.
    let ferry = Ferry::builder().engine(card.clone(), 1).build()?;

    // The ring that packets arrived in, and the memory that the message is wanted in.
    let ring: Vec<u8> = (0..PACKETS * BUFFER).map(|at| (at / BUFFER + at) as u8).collect();
    let packets: Vec<&[u8]> = ring.chunks(BUFFER).map(|buffer| &buffer[..PACKET]).collect();
    let mut message = vec![0u8; PACKETS * PACKET];
    let arrived = Notification::new(0);

    let rounds = ferry.scope(|scope| {
        let options = Options::new().notify(&arrived, 1).spare_caller();
        let delivery = scope.ideliver(&packets, &mut message, options)?;
        let mut rounds = 0u64;
        while arrived.load() != 1 {
            compute();
            rounds += 1;
        }
        delivery.wait().map(drop)?;
        Ok::<_, Error>(rounds)
    })?;

    assert_eq!(message, packets.concat());
    let done = card.counters();
    println!("{PACKETS} packets of {PACKET} bytes in {} frames", done.frames);
    println!(
        "{} bytes by the card, {} by the processor",
        done.bytes_by_card, done.bytes_by_processor
    );
    println!("{} notification set by the card, behind the data", done.notices);
    println!("computed {rounds} rounds meanwhile");
    Ok(())
}

/// The card that was handed over, or a model.
fn card() -> Result<NicEngine, Box<dyn std::error::Error>> {
    if let Some(address) = ready(E1000E).first() {
        println!("the card at {address}");
        return Ok(NicEngine::open(address, Settings::default())?);
    }
    println!("no card was handed over: a MODEL of one, whose speed is that of a thread");
    Ok(NicEngine::over_model(NicModel::new(), Settings::default())?)
}

/// Something to do meanwhile.
fn compute() {
    black_box(
        (0..black_box(1000u64)).fold(1, |product: u64, factor| product.wrapping_mul(factor | 1)),
    );
}
