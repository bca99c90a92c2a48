"""storages"""
