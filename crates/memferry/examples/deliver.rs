//! Delivers a message that arrived in packets to its final buffer, by a network card in loopback
//! mode, while the program computes: one transfer with one notification variable.
//!
//! `cargo run --release -p memferry --example deliver`
//!
//! Uses the first card that is bound to vfio-pci (`memferry doctor` prints how), or a model of a
//! card.

#![allow(clippy::print_stdout, reason = "an example shows something")]

use std::hint::black_box;
use std::sync::Arc;

use memferry::engine::nic::{NicConfig, NicEngine};
use memferry::engine::pci::available_devices;
use memferry::engine::testing::nic_model::NicModel;
use memferry::{Error, Ferry, Notification, Options};
use memferry_sys::vfio::pci::E1000E;

/// The size of a buffer of the ring in bytes, and the size of the packet in it.
const BUFFER: usize = 2 << 10;
const PACKET: usize = 1460;
const PACKETS: usize = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let card = Arc::new(card()?);
    // The card is the only engine: the planner would prefer processors, which are faster.
    let ferry = Ferry::builder().engine(card.clone(), 1).build()?;

    // The ring in which the packets arrived, and the target buffer of the message.
    let ring: Vec<u8> = (0..PACKETS * BUFFER).map(|at| (at / BUFFER + at) as u8).collect();
    let packets: Vec<&[u8]> = ring.chunks(BUFFER).map(|buffer| &buffer[..PACKET]).collect();
    let mut message = vec![0u8; PACKETS * PACKET];
    let arrived = Notification::new(0);

    let rounds = ferry.scope(|scope| {
        let options = Options::new().notify(&arrived, 1).no_caller_assist();
        let delivery = scope.ideliver_with(&packets, &mut message, options)?;
        let mut rounds = 0u64;
        while arrived.load() != 1 {
            compute();
            rounds += 1;
        }
        delivery.wait()?;
        Ok::<_, Error>(rounds)
    })?;

    assert_eq!(message, packets.concat());
    let done = card.counters();
    println!("{PACKETS} packets of {PACKET} bytes in {} frames", done.frames);
    println!(
        "{} bytes by the card, {} by the processor",
        done.bytes_by_card, done.bytes_by_processor
    );
    println!("{} notification set by the card, behind the data", done.notification_writes);
    println!("computed {rounds} rounds meanwhile");
    Ok(())
}

/// Opens the first available card, or a model.
fn card() -> Result<NicEngine, Box<dyn std::error::Error>> {
    if let Some(address) = available_devices(E1000E).first() {
        println!("the card at {address}");
        return Ok(NicEngine::open(address, NicConfig::default())?);
    }
    println!("no card was handed over: a MODEL of one, whose speed is that of a thread");
    Ok(NicEngine::over_model(NicModel::new(), NicConfig::default())?)
}

/// Stands for the program's own work.
fn compute() {
    black_box(
        (0..black_box(1000u64)).fold(1, |product: u64, factor| product.wrapping_mul(factor | 1)),
    );
}
