use std::sync::Arc;

use memferry::PinLimits;
use memferry::engine::cpu::ProfileSource;
use memferry::engine::testing::cuda_model::CudaModel;

use super::*;

fn device_info() -> CudaDeviceInfo {
    CudaDeviceInfo {
        ordinal: 0,
        name: "Invented GPU".into(),
        address: None,
        driver_version: 12_080,
        copy_engines: 3,
        registers_read_only: true,
    }
}

#[test]
fn a_machine_without_a_gpu_is_told_so_and_what_a_gpu_would_need() {
    let check = driver(&CudaInventory::NoDriver, 0);
    assert_eq!(check.status, Status::Missing);
    assert!(check.detail.contains("no NVIDIA GPU"), "{}", check.detail);
    assert!(check.fix.unwrap().contains("no CUDA toolkit"));
}

#[test]
fn a_gpu_without_its_driver_is_seen_on_the_bus() {
    let bus = tempfile::TempDir::new().unwrap();
    let devices = [
        ("gpu", "0x10de", "0x030200"),
        ("sound", "0x10de", "0x040300"),
        ("net", "0x15b3", "0x020000"),
    ];
    for (name, vendor, class) in devices {
        let device = bus.path().join(name);
        fs::create_dir(&device).unwrap();
        fs::write(device.join("vendor"), vendor).unwrap();
        fs::write(device.join("class"), class).unwrap();
    }
    assert_eq!(count_on_bus(bus.path()), 1);
    assert_eq!(count_on_bus(&bus.path().join("nothing")), 0);
    let check = driver(&CudaInventory::NoDriver, 1);
    assert!(check.detail.contains("1 NVIDIA GPU(s), but no driver"), "{}", check.detail);
    assert!(check.fix.unwrap().starts_with("install the NVIDIA driver"));
}

#[test]
fn a_driver_that_cannot_be_used_says_why() {
    let check = driver(&CudaInventory::Unusable("it is for CUDA 10.2".into()), 1);
    assert_eq!(check.status, Status::Missing);
    assert!(check.detail.contains("CUDA 10.2") && check.fix.is_some());
    assert_eq!(driver(&CudaInventory::Devices(vec![]), 1).status, Status::Missing);
}

#[test]
fn a_gpu_is_shown_with_what_it_has() {
    let check = driver(&CudaInventory::Devices(vec![(device_info(), 80 << 30)]), 1);
    assert_eq!((check.status, check.fix), (Status::Ok, None));
    assert!(check.detail.contains("CUDA 12.8, 1 GPU(s)"), "{}", check.detail);
    let detail = device(&device_info(), 80 << 30).detail;
    for word in ["0: Invented GPU", "80 GiB", "3 copy engine(s)"] {
        assert!(detail.contains(word), "{detail}");
    }
}

#[test]
fn memory_that_cannot_be_kept_registered_comes_with_a_cure() {
    assert_eq!(registered(Ok(Some(true)), Ok(())).status, Status::Ok);
    assert_eq!(registered(Ok(None), Err(userfault::UserfaultDenied::Forbidden)).status, Status::Ok);
    assert_eq!(registered(Err("perhaps".into()), Ok(())).status, Status::Warn);
    let check = registered(Ok(Some(true)), Err(userfault::UserfaultDenied::Forbidden));
    assert_eq!(check.status, Status::Warn);
    assert!(check.fix.unwrap().contains("userfaultfd"));
}

#[test]
fn a_copy_there_and_back_is_compared() {
    let limits = PinLimits { max_bytes: 64 << 20, max_entries: 64 };
    let gpu = CudaEngine::with_driver(CudaModel::new(), CudaProfile::default(), limits).unwrap();
    let gpu = Arc::new(gpu);
    let builder = Ferry::builder().profile(ProfileSource::BuiltIn);
    let ferry = builder.engine(gpu.clone(), 2).build().unwrap();
    copy_round_trip(&ferry, &gpu).unwrap();
    let check = a_copy(0, Ok(*gpu.profile()));
    assert_eq!(check.status, Status::Ok);
    assert!(check.detail.contains("50 GB/s in"), "{}", check.detail);
}

#[test]
fn a_gpu_that_cannot_be_opened_is_reported_with_its_reason() {
    let check = a_copy(4000, try_copy(4000));
    assert_eq!(check.status, Status::Missing);
    assert!(check.detail.starts_with("4000: ") && check.fix.is_some(), "{check:?}");
}

#[test]
fn the_variable_is_explained_whatever_it_holds() {
    for (value, count, status) in [
        (None, 0, Status::Ok),
        (Some("off"), 1, Status::Ok),
        (Some("auto"), 0, Status::Ok),
        (Some("auto"), 2, Status::Ok),
        (Some("1"), 2, Status::Ok),
        (Some("2"), 2, Status::Warn),
        (Some("0"), 0, Status::Warn),
        (Some("fast"), 1, Status::Warn),
    ] {
        let check = setting(value, count);
        assert_eq!(check.status, status, "{value:?} with {count}");
        assert_eq!(check.fix.is_some(), status == Status::Warn, "{value:?} with {count}");
    }
}
